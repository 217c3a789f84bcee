// Whole runs of several ranks on the tiny model.
#pragma once

#include "tests/contract/run_ranks.h"
#include "tests/fault/training_fixture.h"

namespace overspill::test {

/// What a run of several ranks leaves: the first rank's, and each rank's own.
struct RankedRun {
  FinishedRun run;
  std::vector<RankResult> ranks;
};

class RanksTest : public TrainingTest {
 protected:
  /// Four sequences a step, whatever the number of ranks.
  TrainConfig ranked_config(uint32_t ranks, bool tied = false) const {
    TrainConfig config = tiny_config(tied);
    config.precision = Precision::float32;
    config.gradient_accumulation_steps = 4 / ranks;
    config.reduce_dtype = ReduceType::float32;
    return config;
  }
  static RankedRun run_ranked(const TrainConfig& config, uint32_t ranks) {
    RankedRun result{.run = {}, .ranks = run_ranks(config, ranks)};
    result.run.report = result.ranks[0].report;
    result.run.lines = metrics_of(config.output_dir);
    result.run.checkpoint = files_in(result.run.report.checkpoint);
    return result;
  }
  /// With an output directory that nothing else has used.
  RankedRun run_ranked_fresh(TrainConfig config, uint32_t ranks) {
    config.output_dir = root_ / ("ranks-" + std::to_string(++runs_));
    RankedRun run = run_ranked(config, ranks);
    fs::remove_all(config.output_dir);
    return run;
  }

 private:
  int runs_ = 0;
};

}  // namespace overspill::test
