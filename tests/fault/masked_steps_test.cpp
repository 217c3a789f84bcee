// Training on token files with loss masks: steps that train nothing, evaluation, and files that say
// no more than other formats do.
#include <gtest/gtest.h>

#include <cmath>

#include "tests/fault/training_fixture.h"
#include "tests/unit/engine/train/prepared_file.h"

namespace overspill {
namespace {

using namespace test;

class MaskedSteps : public TrainingTest {
 protected:
  static constexpr size_t kLength = 32;

  /// One document a sequence; tokens by the sequence's key, none trained on where it is 0.
  static PreparedFile file_of(const std::vector<uint64_t>& keys) {
    PreparedFile file{
        .tokens = {}, .starts = {}, .sequence_len = kLength, .vocab_size = kVocabulary};
    for (const uint64_t key : keys) {
      file.starts.push_back(file.tokens.size());
      for (size_t i = 0; i < kLength; ++i) {
        file.tokens.push_back(static_cast<uint32_t>(random_below(key, i, kVocabulary)));
        file.trained.push_back(key != 0 && i > 4);
      }
    }
    return file;
  }
  DatasetConfig dataset(const std::string& name, const PreparedFile& file,
                        bool evaluation = false) const {
    put_file(root_ / name, file.bytes());
    return {.path = root_ / name, .type = TokenFormat::automatic, .evaluation = evaluation};
  }
  /// Steps of two micro-batches of one sequence each, in the file's order.
  TrainConfig config_of(const std::vector<uint64_t>& keys) const {
    TrainConfig config = tiny_config();
    config.shuffle = false;
    config.max_steps = keys.size() / 2;
    config.datasets = {dataset(fmt::format("train-{}.tokens", keys.size()), file_of(keys))};
    return config;
  }
};

TEST_F(MaskedSteps, AStepWithoutTrainedTokensIsAsIfItHadNotBeen) {
  for (const bool in_backward : {false, true}) {
    SCOPED_TRACE(in_backward);
    TrainConfig with = config_of({1, 2, 0, 0, 3, 4}), without = config_of({1, 2, 3, 4});
    if (in_backward) update_in_backward(with), update_in_backward(without);
    const FinishedRun skipped = run_fresh(with), plain = run_fresh(without);
    for (const char* name : {"model.safetensors", "optimizer.safetensors"}) {
      EXPECT_EQ(skipped.checkpoint.at(name), plain.checkpoint.at(name)) << name;
    }
    EXPECT_EQ(skipped.report.skipped_updates, 1u);
    const std::vector<Json> steps = skipped.steps();
    ASSERT_EQ(steps.size(), 3u);
    EXPECT_TRUE(steps[1].at("loss").is_null());
    EXPECT_TRUE(std::isfinite(skipped.report.first_loss) &&
                std::isfinite(skipped.report.last_loss));
    EXPECT_EQ(steps[1].at("grad_norm"), 0.0);
    EXPECT_EQ(steps[1].at("trained_tokens"), 0u);
    EXPECT_EQ(steps[1].at("update_skipped"), true);
    EXPECT_EQ(steps[2].at("loss"), plain.steps()[1].at("loss"));
    EXPECT_EQ(steps[2].at("trained_tokens"), 2 * (kLength - 5));
  }
}

TEST_F(MaskedSteps, AMicroBatchWithoutTrainedTokensAddsNothing) {
  TrainConfig with = config_of({1, 0}), alone = config_of({1});
  alone.gradient_accumulation_steps = 1;
  alone.max_steps = 1;
  const FinishedRun both = run_fresh(with), one = run_fresh(alone);
  EXPECT_EQ(both.steps()[0].at("loss"), one.steps()[0].at("loss"));
  EXPECT_EQ(both.steps()[0].at("grad_norm"), one.steps()[0].at("grad_norm"));
  EXPECT_EQ(both.checkpoint.at("model.safetensors"), one.checkpoint.at("model.safetensors"));
}

TEST_F(MaskedSteps, EvaluationCountsTrainedTokensAlone) {
  const auto eval_loss = [&](const std::string& name,
                             const std::vector<uint64_t>& keys) -> std::optional<Json> {
    TrainConfig config = config_of({1, 2});
    config.datasets.push_back(dataset(name, file_of(keys), true));
    config.eval_sequences = static_cast<uint32_t>(keys.size());
    for (const Json& line : run_fresh(config).lines) {
      if (line.contains("eval_loss")) return line.at("eval_loss");
    }
    return std::nullopt;
  };
  const auto one = eval_loss("one.tokens", {7}), more = eval_loss("more.tokens", {0, 7, 0});
  ASSERT_TRUE(one && one->is_number());
  EXPECT_EQ(one, more);
  EXPECT_EQ(eval_loss("none.tokens", {0, 0}), std::nullopt);
}

/// A prepared stream of one document, all trained on, gives the bits of a file without marks.
TEST_F(MaskedSteps, AFileThatMarksNothingChangesNothing) {
  PreparedFile file{.tokens = {}, .starts = {0}, .vocab_size = kVocabulary};
  const std::string bytes = token_bytes(4001, 1);
  for (size_t i = 0; i < bytes.size(); i += 2) {
    file.tokens.push_back(static_cast<uint8_t>(bytes[i]) | static_cast<uint8_t>(bytes[i + 1]) << 8);
  }
  TrainConfig config = tiny_config();
  const FinishedRun plain = run_fresh(config);
  config.datasets = {dataset("stream.tokens", file)};
  const FinishedRun prepared = run_fresh(config);
  EXPECT_EQ(step_text(plain.lines), step_text(prepared.lines));
  for (const char* name : {"model.safetensors", "optimizer.safetensors"}) {
    EXPECT_EQ(plain.checkpoint.at(name), prepared.checkpoint.at(name)) << name;
  }
  EXPECT_FALSE(plain.steps()[0].contains("trained_tokens"));
  EXPECT_EQ(prepared.steps()[0].at("trained_tokens"), 64u);
}

}  // namespace
}  // namespace overspill
