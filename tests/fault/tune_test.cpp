// Tuning: what is tried, what wins, and the file that is written. Runs are made up, but for one.
#include "engine/train/tuner.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "engine/base/fd.h"
#include "tests/fault/training_fixture.h"

namespace overspill::test {
namespace {

class TuneTest : public TrainingTest {
 protected:
  TuneReport run_tune(const TuneRunner& run, uint32_t runs = 6) {
    const std::atomic<bool> stop = false;
    return tune({.config = write_yaml(), .overrides = {}, .runs = runs, .steps = 1}, run, stop,
                [](const char*, size_t, size_t, const std::string&) {});
  }
};

TEST_F(TuneTest, SimulatesManyAndRunsFew) {
  uint32_t runs = 0;
  const TuneReport report = run_tune([&](const TrainConfig&) { return 1.0 + 0.1 * runs++; });
  EXPECT_EQ(runs, 6u);
  EXPECT_GT(report.simulated, 500u);
  ASSERT_EQ(report.measured.size(), 6u);
  EXPECT_TRUE(report.measured.front().settings.empty()) << "the file as it is comes first";
  std::set<std::vector<std::string>> tried;
  for (const TuneTrial& trial : report.measured) tried.insert(trial.settings);
  EXPECT_EQ(tried.size(), 6u) << "nothing twice";
  for (const TuneTrial& trial : report.best) {
    EXPECT_LE(report.best.front().predicted, trial.predicted * 1.03) << "fastest first, but for "
                                                                        "what settings cost";
  }
}

TEST_F(TuneTest, SaysWhenNothingBeatsTheFile) {
  uint32_t runs = 0;
  const TuneReport report = run_tune([&](const TrainConfig&) { return runs++ == 0 ? 1.0 : 0.995; });
  EXPECT_TRUE(report.winner.settings.empty());
  EXPECT_TRUE(has(tune_text(report), "nothing tried beats the file as it is"));
}

TEST_F(TuneTest, TheFastestRunWinsWhateverWasPredicted) {
  std::vector<TrainConfig> configs;
  const TuneReport report = run_tune([&](const TrainConfig& config) {
    configs.push_back(config);
    return config.offload.io.block_size == 2 * kMiB ? 0.5 : 1.0;
  });
  const auto& settings = report.winner.settings;
  EXPECT_NE(std::ranges::find(settings, "offload.io.block_size=2097152"), settings.end());
  // The written file is a training file with the winner's settings, and only those, changed.
  const fs::path path = root_ / "tuned.yaml";
  write_text_file(path, tuned_yaml(root_ / "train.yaml", {"seed=7"}, report));
  const TrainConfig tuned = load_train_config(path);
  EXPECT_EQ(tuned.offload.io.block_size, 2 * kMiB);
  EXPECT_EQ(tuned.seed, 7u) << "what the command line set";
  EXPECT_EQ(tuned.learning_rate, configs.front().learning_rate);
  EXPECT_EQ(tuned.micro_batch_size * tuned.gradient_accumulation_steps, 2u);
  EXPECT_TRUE(has(tune_html(report), "</html>"));
  EXPECT_EQ(Json::parse(tune_json(report)).at("winner").at("measured_seconds"), 0.5);
}

TEST_F(TuneTest, WithoutRunsThePredictionDecides) {
  const TuneReport report = run_tune({}, 0);
  EXPECT_TRUE(report.measured.empty());
  EXPECT_EQ(report.winner.settings, report.best.front().settings);
  EXPECT_GE(report.by_depth.size(), 2u);
}

TEST_F(TuneTest, TheCommandRunsWritesAndLeavesNothing) {
  write_yaml();
  const Child::Result result = Child(root_,
                                     {"tune", root_ / "train.yaml", "--runs", "2", "--steps", "1",
                                      "--html", root_ / "tune.html"},
                                     {})
                                   .wait();
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_TRUE(has(result.out, "Short runs: predicted beside measured")) << result.out;
  EXPECT_TRUE(has(result.err, "[2/2]")) << result.err;
  EXPECT_FALSE(fs::exists(root_ / "out")) << "trials keep nothing";
  EXPECT_TRUE(fs::exists(root_ / "tune.html"));
  const Child::Result refused =
      Child(root_, {"tune", root_ / "train.yaml", "--output", "/elsewhere/tuned.yaml"}, {}).wait();
  EXPECT_EQ(refused.exit_code, 2) << refused.err;
}

}  // namespace
}  // namespace overspill::test
