// Whole runs against failing drives, small budgets, full disks, kills and interrupts: each ends in
// one clean Error or in the bits of an undisturbed run.
#include <gtest/gtest.h>

#include <atomic>

#include "tests/contract/devices.h"
#include "tests/fault/training_fixture.h"

namespace overspill {
namespace {

using namespace test;

class TrainingFault : public TrainingTest {
 protected:
  /// Faults in every channel, or only in the one that loads and saves, which is made first.
  TrainConfig with_faults(const FaultPlan& plan, DeviceMode device, bool only_first = false) const {
    TrainConfig config = tiny_config();
    config.max_steps = 2;
    config.save_steps = 1;
    config.offload.device = device;
    const auto channels = std::make_shared<std::atomic<int>>(0);
    config.offload.io.wrap = [=](std::unique_ptr<AsyncIo> io) {
      return (*channels)++ > 0 && only_first ? std::move(io) : make_faulty_io(std::move(io), plan);
    };
    return config;
  }
  std::vector<fs::path> swap_files() const {
    std::vector<fs::path> found;
    for (const auto& entry : fs::recursive_directory_iterator(root_)) {
      if (entry.path().extension() == ".swap") found.push_back(entry.path());
    }
    return found;
  }
  /// A refusal before any work: it leaves nothing on the drives nor in output_dir.
  std::string refused(const TrainConfig& config, ErrorCode code) {
    const Error error = refusal(config);
    EXPECT_STREQ(error_code_name(error.code()), error_code_name(code)) << error.what();
    for (const fs::path& path : config.offload.nvme_paths) EXPECT_FALSE(fs::exists(path)) << path;
    EXPECT_FALSE(fs::exists(config.output_dir));
    return error.what();
  }
  /// The byte size after `key: ` in an advice such as "set offload.host_memory: 3MiB".
  static uint64_t advised(const std::string& text, const std::string& key) {
    const size_t at = text.find("set " + key + ": ");
    EXPECT_NE(at, std::string::npos) << text;
    const size_t begin = at + key.size() + 6, end = text.find("MiB", begin) + 3;
    return parse_bytes(text.substr(begin, end - begin));
  }
};

/// Request k of a channel (the one that loads and saves, the read lane, the write lane) and all
/// after it fail.
TEST_F(TrainingFault, AnyRequestThatKeepsFailingEndsInOneError) {
  size_t failures = 0, in_saves = 0;
  bool ended_well = false;
  for (uint64_t i = 0; i < 200 && !ended_well; ++i) {
    const uint64_t k = i / 2 + i * i / 64;
    SCOPED_TRACE(fmt::format("request {}", k));
    const DeviceMode device = i % 4 < 2 ? DeviceMode::unified : DeviceMode::discrete;
    const TrainConfig config = with_faults({.fail_request = k}, device, i % 2 == 0);
    fs::remove_all(config.output_dir);
    const Error error = refusal(config);
    const std::string text = error.what();
    EXPECT_TRUE(swap_files().empty());
    if (error.code() == ErrorCode::internal) {  // past its last request
      ended_well = i % 2 == 1;                  // the lanes have more
      continue;
    }
    ++failures;
    in_saves += text.starts_with("save ");
    EXPECT_EQ(error.code(), ErrorCode::io);
    EXPECT_TRUE(has(text, " of layer "));
    EXPECT_TRUE(has(text, (root_ / "nvme0" / "overspill-").string()));
    EXPECT_TRUE(has(text, "Input/output error after 3 tries"));
    EXPECT_TRUE(has(text, "resume from the last checkpoint"));
    EXPECT_EQ(text.find('\n'), std::string::npos);
    for (const std::string& name : names_in(config.output_dir)) {
      EXPECT_FALSE(name.starts_with(".")) << name;
      if (name.starts_with("checkpoint-")) open_checkpoint(config.output_dir / name);
    }
  }
  EXPECT_TRUE(ended_well);
  EXPECT_GT(failures, 20u);
  EXPECT_GT(in_saves, 5u);
}

TEST_F(TrainingFault, TransientErrorsAndShortTransfersChangeNoBit) {
  const FinishedRun clean = run_fresh(with_faults({}, DeviceMode::unified));
  uint64_t k = 0;
  for (const DeviceMode device : devices_under_test()) {
    for (int i = 0; i < 5; ++i, k += 9) {
      SCOPED_TRACE(fmt::format("request {}", k));
      const FaultPlan once{.fail_request = k, .times = 1}, twice{.fail_request = k, .times = 2};
      expect_same_results(clean, run_fresh(with_faults(i % 2 ? once : twice, device)));
      expect_same_results(clean, run_fresh(with_faults({.short_request = k}, device)));
    }
  }
}

TEST_F(TrainingFault, ErrorsThatCannotPassAreNotTriedAgain) {
  const TrainConfig config =
      with_faults({.fail_request = 40, .error = ENOSPC}, DeviceMode::discrete);
  const std::string text = refusal(config).what();
  EXPECT_TRUE(has(text, "No space left on device ("));
  EXPECT_TRUE(has(text, "set offload.nvme_paths to a larger drive"));
}

TEST_F(TrainingFault, SmallMemoryIsRefusedAndTheAdviceWorks) {
  for (const DeviceMode device : devices_under_test()) {
    TrainConfig config = tiny_config();
    config.max_steps = 1;
    config.offload.device = device;
    config.offload.device_memory = 100'000;
    std::string text = refused(config, ErrorCode::does_not_fit);
    EXPECT_TRUE(has(text, "offload.device_memory of 97.66 KiB is "));
    config.offload.device_memory = advised(text, "offload.device_memory");
    config.offload.host_memory = 5000;
    text = refused(config, ErrorCode::does_not_fit);
    EXPECT_TRUE(has(text, "offload.host_memory of 4.88 KiB is "));
    config.offload.host_memory = advised(text, "offload.host_memory");
    TrainConfig less = config;
    *less.offload.device_memory -= 1 * kMiB;
    refused(less, ErrorCode::does_not_fit);
    less = config;
    *less.offload.host_memory -= 1 * kMiB;
    refused(less, ErrorCode::does_not_fit);
    EXPECT_EQ(run_fresh(config).steps().size(), 1u);
    fs::remove_all(root_ / "nvme0");
  }
}

TEST_F(TrainingFault, StateThatNeedsADriveIsRefusedWithoutOne) {
  TrainConfig config = tiny_config();
  config.offload.nvme_paths.clear();
  EXPECT_TRUE(has(refused(config, ErrorCode::invalid_config), "set offload.nvme_paths"));
  place_all(config, Placement::automatic);
  config.offload.host_memory = 512 * kKiB;
  config.offload.device_memory = 3 * kMiB;
  EXPECT_TRUE(has(refused(config, ErrorCode::does_not_fit), "give offload.nvme_paths"));
}

TEST_F(TrainingFault, CapacityIsALimitOfAllFilesTogether) {
  for (const size_t drives : {1u, 3u}) {
    TrainConfig config = tiny_config();
    config.max_steps = 1;
    config.offload.nvme_capacity = 1 * kMiB;
    config.offload.nvme_paths.clear();
    for (size_t i = 0; i < drives; ++i) {
      config.offload.nvme_paths.push_back(root_ / ("nvme" + std::to_string(i)));
    }
    const std::string text = refused(config, ErrorCode::does_not_fit);
    EXPECT_TRUE(has(text, "offload.nvme_capacity of 1.00 MiB is "));
    config.offload.nvme_capacity = advised(text, "offload.nvme_capacity");
    uint64_t used = 0;
    config.offload.io.wrap = [&](std::unique_ptr<AsyncIo> io) {
      used = 0;
      for (const fs::path& file : swap_files()) used += fs::file_size(file);
      return io;
    };
    run_fresh(config);
    EXPECT_GT(used, 1 * kMiB);
    EXPECT_LE(used, *config.offload.nvme_capacity) << drives << " drives";
    *config.offload.nvme_capacity -= 1 * kMiB;
    for (const fs::path& path : config.offload.nvme_paths) fs::remove_all(path);
    refused(config, ErrorCode::does_not_fit);
  }
}

TEST_F(TrainingFault, ADiskTooSmallForTheSwapFilesIsRefused) {
  if (!mount_small_disk(8)) GTEST_SKIP() << "no permission to mount a loop device";
  ASSERT_TRUE(shell("fallocate -l 6M " + (root_ / "small" / "filler").string()));
  TrainConfig config = tiny_config();
  config.offload.nvme_paths = {root_ / "small" / "swap"};
  const std::string text = refused(config, ErrorCode::does_not_fit);
  EXPECT_TRUE(has(text, (root_ / "small" / "swap").string() + ": needs "));
  EXPECT_TRUE(has(text, "set offload.nvme_paths to a larger drive"));
  EXPECT_TRUE(swap_files().empty());
}

TEST_F(TrainingFault, ADiskThatFillsUpFailsTheSaveAndKeepsTheOthers) {
  if (!mount_small_disk(8)) GTEST_SKIP() << "no permission to mount a loop device";
  TrainConfig config = tiny_config();
  config.max_steps = 12;
  const FinishedRun whole = run_fresh(config);
  config.output_dir = root_ / "small" / "out";
  config.save_steps = 1;
  const Error error = refusal(config);
  EXPECT_EQ(error.code(), ErrorCode::io) << error.what();
  EXPECT_TRUE(has(error.what(), "save " + (config.output_dir / "checkpoint-").string()));
  EXPECT_TRUE(has(error.what(), "No space left on device"));
  EXPECT_TRUE(has(error.what(), "earlier checkpoints are untouched"));
  size_t complete = 0;
  for (const std::string& name : names_in(config.output_dir)) {
    EXPECT_FALSE(name.starts_with(".")) << name;
    if (!name.starts_with("checkpoint-")) continue;
    open_checkpoint(config.output_dir / name);
    ++complete;
  }
  ASSERT_GE(complete, 1u);
  TrainConfig resumed = tiny_config();
  resumed.max_steps = 12;
  resumed.resume_from_checkpoint = config.output_dir / "latest";
  const FinishedRun rest = run_fresh(resumed);
  EXPECT_EQ(rest.report.steps, 12 - complete);
  expect_same_files(whole.checkpoint, rest.checkpoint);
}

// ---- the command, killed and interrupted --------------------------------------------------

class TrainingSignals : public TrainingFault {
 protected:
  static constexpr const char* kSteps = "max_steps=150";
  /// Slow steps, so that a run is not over before its signal comes.
  static std::vector<std::string> slow(const std::string& more) {
    return {kSteps, "offload.io.block_size=4096", "offload.io.queue_depth=1", more};
  }

  void SetUp() override {
    TrainingTest::SetUp();
    write_yaml();
    TrainConfig config = tiny_config();
    config.max_steps = 150;
    whole_ = run_fresh(config);
  }
  bool wait_for_line(Child& child, uint64_t line) const {
    return child.wait_until([&] {
      const std::string text = bytes_of_file(root_ / "out" / "metrics.jsonl");
      return std::count(text.begin(), text.end(), '\n') >= static_cast<ptrdiff_t>(line);
    });
  }
  /// Continues the run in root_/out to its end and compares it with the undisturbed one.
  Child::Result expect_resume() const {
    Child::Result result = start({kSteps, "resume_from_checkpoint=true"}).wait();
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(step_text(whole_.lines), step_text(metrics_of(root_ / "out")));
    expect_same_files(whole_.checkpoint, files_in(root_ / "out" / "checkpoint-150"));
    return result;
  }

  FinishedRun whole_;
};

TEST_F(TrainingSignals, AKilledRunsFilesAreReclaimedAndItResumes) {
  Child child = start(slow("save_steps=4"));
  ASSERT_TRUE(wait_for_line(child, 10)) << child.wait().err;
  child.send(SIGKILL);
  EXPECT_EQ(child.wait().signal, SIGKILL);
  ASSERT_EQ(swap_files().size(), 1u) << "the run was over before it was killed";
  const std::string left = swap_files()[0];
  const Child::Result result = expect_resume();
  EXPECT_TRUE(has(result.err, "of a dead run"));
  EXPECT_TRUE(has(result.err, left));
  EXPECT_TRUE(swap_files().empty());
}

TEST_F(TrainingSignals, InterruptsFinishTheStepSaveAndExit130) {
  for (const int signal : {SIGINT, SIGTERM}) {
    fs::remove_all(root_ / "out");
    Child child = start(slow("save_steps=0"));
    ASSERT_TRUE(wait_for_line(child, 5)) << child.wait().err;
    child.send(signal);
    const Child::Result result = child.wait();
    EXPECT_EQ(result.exit_code, 130) << result.err;
    EXPECT_TRUE(has(result.out, "interrupted after "));
    EXPECT_TRUE(has(result.out, "resume_from_checkpoint=true"));
    const Json last = metrics_of(root_ / "out").back();
    EXPECT_EQ(last.at("interrupted"), true);
    const uint64_t step = last.at("step").get<uint64_t>();
    EXPECT_GE(step, 5u);
    EXPECT_LT(step, 150u);
    EXPECT_EQ(fs::read_symlink(root_ / "out" / "latest"), fmt::format("checkpoint-{}", step));
    EXPECT_TRUE(swap_files().empty());
    expect_resume();
  }
}

TEST_F(TrainingSignals, TwoRunsInTheSameDirectoriesDoNotDisturbEachOther) {
  Child first = start({kSteps});
  ASSERT_TRUE(wait_for_line(first, 1)) << first.wait().err;
  Child second = start({kSteps, "output_dir=" + (root_ / "second").string()});
  const Child::Result one = first.wait(), two = second.wait();
  EXPECT_EQ(one.exit_code, 0) << one.err;
  EXPECT_EQ(two.exit_code, 0) << two.err;
  EXPECT_EQ(one.err.find("dead run"), std::string::npos) << one.err;
  EXPECT_EQ(two.err.find("dead run"), std::string::npos) << two.err;
  expect_same_files(whole_.checkpoint, files_in(root_ / "out" / "checkpoint-150"));
  expect_same_files(whole_.checkpoint, files_in(root_ / "second" / "checkpoint-150"));
}

}  // namespace
}  // namespace overspill
