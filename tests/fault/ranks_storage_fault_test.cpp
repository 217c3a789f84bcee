// What one rank of a run alone meets: a drive that fails, a full disk, a damaged file, values that
// are not finite. All ranks come to the same end.
#include <cstring>
#include <limits>

#include "engine/model/safetensors.h"
#include "tests/fault/launch_fixture.h"
#include "tests/fault/ranks_process_fixture.h"

namespace overspill::test {
namespace {

class RanksStorageFault : public RanksProcessTest {
 protected:
  static void expect_rank_failed(const Child::Result& result, int code, const std::string& rank,
                                 const std::string& error) {
    EXPECT_EQ(result.exit_code, code) << result.err;
    const std::string last = last_line(result.err);
    EXPECT_TRUE(last.starts_with("overspill: rank " + rank)) << last;
    EXPECT_TRUE(has(last, fmt::format("ended with exit code {}: {}", code, error))) << result.err;
  }
  /// Checkpoints are whole, and nothing else is there.
  size_t whole_checkpoints(const fs::path& output_dir) const {
    size_t count = 0;
    for (const std::string& name : names_in(output_dir)) {
      EXPECT_FALSE(name.starts_with(".")) << name;
      if (!name.starts_with("checkpoint-")) continue;
      open_checkpoint(output_dir / name);
      ++count;
    }
    return count;
  }
  static void overwrite(const fs::path& path, uint64_t at, const std::string& bytes) {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(static_cast<std::streamoff>(at));
    file << bytes;
    ASSERT_TRUE(file.flush()) << path;
  }
};

TEST_F(RanksStorageFault, ADriveOfOneRankThatFailsEndsAll) {
  if (!mount_small_disk(16)) GTEST_SKIP() << "no permission to mount a loop device";
  const uint16_t port = free_port();
  std::vector<std::unique_ptr<Child>> ranks;
  for (const int rank : {0, 1}) {
    const fs::path drive = rank == 1 ? root_ / "small" : root_ / "nvme0";
    ranks.push_back(
        start_program(OVERSPILL_BINARY,
                      train_words("out", {"max_steps=100000", "save_steps=10", "save_total_limit=2",
                                          "offload.nvme_paths=[" + drive.string() + "]"}),
                      {fmt::format("RANK={}", rank), "WORLD_SIZE=2", "MASTER_ADDR=127.0.0.1",
                       fmt::format("MASTER_PORT={}", port)}));
  }
  ASSERT_TRUE(wait_for_line(*ranks[0], "out", 25)) << ranks[0]->wait().err;
  // What lies beyond the end of its backing file, the loop device can neither read nor write.
  ASSERT_TRUE(shell("truncate -s 1M " + (root_ / "disk").string()));
  const Child::Result zero = ranks[0]->wait(), one = ranks[1]->wait();
  EXPECT_EQ(zero.exit_code, 1) << zero.err;
  EXPECT_EQ(one.exit_code, 1) << one.err;
  EXPECT_TRUE(has(last_line(one.err), "overspill: io: "));
  EXPECT_TRUE(has(last_line(one.err), (root_ / "small").string() + "/overspill-"));
  // An I/O error, or the zeros of the page in which the file ends, which its checksum finds.
  const bool zeros = last_line(one.err).find("fail their checksum") != std::string::npos;
  EXPECT_TRUE(zeros || has(last_line(one.err), "Input/output error"));
  // The other one's cause is the same, with its place.
  EXPECT_TRUE(has(last_line(zero.err), "overspill: rank_lost: rank 1 (host "));
  EXPECT_TRUE(has(last_line(zero.err), last_line(one.err).substr(std::strlen("overspill: "))));
  EXPECT_GE(whole_checkpoints(root_ / "out"), 1u);
  expect_nobody_left();
}

TEST_F(RanksStorageFault, AFullDiskEndsAllAndKeepsEarlierCheckpoints) {
  if (!mount_small_disk(8)) GTEST_SKIP() << "no permission to mount a loop device";
  const Child::Result result = launch(4, "small/out", {"max_steps=50", "save_steps=1"})->wait();
  expect_rank_failed(result, 1, "", "io: save ");
  EXPECT_TRUE(has(last_line(result.err), "No space left on device"));
  EXPECT_TRUE(has(last_line(result.err), "earlier checkpoints are untouched"));
  EXPECT_GE(whole_checkpoints(root_ / "small" / "out"), 1u);
  expect_nobody_left();
}

TEST_F(RanksStorageFault, ADamagedCheckpointIsRefusedByAllRanks) {
  ASSERT_EQ(launch(4, "out", {"max_steps=2"})->wait().exit_code, 0);
  const fs::path directory = root_ / "out" / "latest";
  for (const char* name : {"config.json", "model.safetensors", "optimizer.safetensors"}) {
    const std::string whole = bytes_of_file(directory / name);
    const size_t middle = whole.size() / 2;
    overwrite(directory / name, middle, {static_cast<char>(whole[middle] ^ 4)});
    const Child::Result result = launch(4, "out", {"resume_from_checkpoint=true"})->wait();
    expect_rank_failed(result, 1, "", "invalid_file: ");
    const std::string last = last_line(result.err);
    EXPECT_TRUE(has(last, std::string(name) + ": its content does not match"));
    EXPECT_TRUE(has(last_line(result.err), "resume from another one"));
    expect_nobody_left();
    overwrite(directory / name, middle, {whole[middle]});
  }
  EXPECT_EQ(launch(4, "out", {"resume_from_checkpoint=true"})->wait().exit_code, 0);
}

/// A model whose embedding of one token is not finite, and a step in which one rank has that token.
class RanksNonFinite : public RanksStorageFault {
 protected:
  static constexpr uint32_t kBadToken = 299, kHidden = 64;

  void SetUp() override {
    RanksStorageFault::SetUp();
    ASSERT_EQ(launch(1, "model", {"max_steps=1"})->wait().exit_code, 0);
    const fs::path weights = root_ / "model" / "latest" / "model.safetensors";
    const SafetensorsFile file(weights);
    const auto* embedding = file.find("model.embed_tokens.weight");
    const float nan = std::numeric_limits<float>::quiet_NaN();
    overwrite(weights, embedding->file_offset + kBadToken * kHidden * sizeof nan,
              {reinterpret_cast<const char*>(&nan), sizeof nan});
    std::string tokens = token_bytes(32 * 16 + 1, 3);
    for (size_t i = 0; i + 1 < tokens.size(); i += 2) {
      if (token_at(tokens, i) == kBadToken) tokens[i + 1] = 0;
    }
    // Step 2 has sequences 4 to 7, one a rank.
    tokens[2 * (32 * 5 + 7)] = static_cast<char>(kBadToken & 0xff);
    tokens[2 * (32 * 5 + 7) + 1] = static_cast<char>(kBadToken >> 8);
    put_file(root_ / "bad.bin", tokens);
  }
  static uint32_t token_at(const std::string& tokens, size_t i) {
    return static_cast<uint8_t>(tokens[i]) | static_cast<uint32_t>(tokens[i + 1]) << 8;
  }
  Child::Result run(const std::string& output, const Words& more) const {
    Words sets = {"base_model=" + (root_ / "model" / "latest").string(),
                  "base_model_config=null",
                  "init_from_scratch=false",
                  "datasets=[{path: " + (root_ / "bad.bin").string() + ", type: nanogpt}]",
                  "shuffle=false",
                  "gradient_accumulation_steps=1",
                  "max_steps=4",
                  "max_grad_norm=0"};
    sets.insert(sets.end(), more.begin(), more.end());
    return launch(4, output, sets)->wait();
  }
};

TEST_F(RanksNonFinite, AllSkipTheSameUpdate) {
  for (const int stage : {0, 3}) {
    std::optional<Outcome> first;  // of the stage, whose parts the norm adds up in their order
    for (const char* update : {"next_forward", "in_backward"}) {
      const std::string output = fmt::format("{}-{}", stage, update);
      SCOPED_TRACE(output);
      const Child::Result result =
          run(output, {fmt::format("zero_stage={}", stage),
                       fmt::format("offload.update={}", update), "offload.gradients=auto"});
      ASSERT_EQ(result.exit_code, 0) << result.err;
      EXPECT_EQ(count_of(result.err, "step 2: non-finite loss: update skipped"), 1u) << result.err;
      std::string skipped;
      for (const Json& line : metrics_of(root_ / output)) {
        if (line.contains("loss")) skipped += line.at("update_skipped") ? "x" : ".";
      }
      EXPECT_EQ(skipped, ".x..");
      if (!first) first = outcome(output);
      expect_same(*first, outcome(output));
    }
  }
}

TEST_F(RanksNonFinite, AllStopAlike) {
  for (const char* update : {"next_forward", "in_backward"}) {
    const Child::Result result = run(update, {fmt::format("offload.update={}", update),
                                              "offload.gradients=auto", "max_non_finite_steps=1"});
    expect_rank_failed(result, 1, "", "non_finite: step 2: non-finite loss, 1 steps in a row");
    EXPECT_EQ(result.err.find("was killed"), std::string::npos) << result.err;
    expect_nobody_left();
  }
}

}  // namespace
}  // namespace overspill::test
