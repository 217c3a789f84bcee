// The training loop of one rank: steps, updates, evaluation, checkpoints, metrics.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <optional>

#include "engine/run/executor.h"
#include "engine/train/checkpoint.h"
#include "engine/train/metrics.h"
#include "engine/train/rank_setup.h"
#include "engine/train/run_setup.h"
#include "engine/train/run_start.h"
#include "engine/train/step_expectation.h"
#include "engine/train/step_results.h"

namespace overspill {

/// Totals of a finished (or interrupted) run.
struct RunReport {
  bool interrupted = false;
  uint64_t steps = 0;  ///< done by this process
  uint64_t skipped_updates = 0;
  double first_loss = 0, last_loss = 0;
  double first_eval_loss = 0, last_eval_loss = 0;
  bool evaluated = false;
  double seconds = 0;
  std::array<uint64_t, kLanes> lane_bytes{};
  double predicted_step_seconds = 0, measured_step_seconds = 0;
  uint64_t peak_resident = 0;
  std::filesystem::path checkpoint, trace, predicted_trace;
};

class Trainer {
 public:
  /// Plans, allocates and loads. Throws Error before any work when something is wrong or too small.
  /// All ranks call everything at once; `ranks` outlives the trainer.
  explicit Trainer(const TrainConfig& config, const Ranks& ranks = alone());

  /// Trains to the end; `stop` makes it finish the step, save and return early.
  RunReport run(const std::atomic<bool>& stop);

  /// Trains steps without keeping anything: those that settle (no update, an update from zero
  /// moments, a steady one), then `steps` more, of which it returns what happened. Fewer when
  /// `stop` is set.
  std::vector<TraceSummary> time_steps(uint32_t steps, const std::atomic<bool>& stop);

  const RunSetup& setup() const { return setup_; }
  /// That the model's data move over.
  const RankGroups& groups() const { return gpu_groups_ ? gpu_groups_->groups() : ranks_.groups(); }

 private:
  struct StepOutcome {
    double loss = 0, grad_norm = 0, learning_rate = 0;
    bool skipped = false;
    std::optional<uint64_t> trained_tokens;  ///< of marked data
    Trace trace;
    const Program* program = nullptr;
  };

  static const Ranks& alone();
  void load(const RunStart& start);
  /// Of this rank, and of all.
  uint64_t own_sequences_per_step() const;
  uint64_t sequences_per_step() const { return own_sequences_per_step() * ranks_.size(); }
  const Program& program(const StepKind& kind);
  StepOutcome train_step();
  void decide_update(StepOutcome& outcome, const StepResults& results);
  /// The scalars of the update of the step under way.
  UpdateStep next_update(double gradient_scale) const;
  Trace execute(const Program& program, StepContext& context);
  /// Applies the pending update, if any, so that the pages are those after `position_.step` steps.
  void flush();
  std::optional<double> evaluate();
  void evaluate_and_log();
  void save();
  void log_step(const StepOutcome& outcome);
  /// The time of a steady step, where offload.hardware_profile tells the machine's rates.
  void log_prediction();
  void finish_report();
  StepContext& context(uint32_t micro_batches);
  void fill_batch(const SequenceData& data, uint64_t cursor, uint32_t micro_batches);
  /// Tokens of the batch under way that count in its loss, of so many micro-batches of all ranks.
  double trained_tokens(size_t micro_batches) const;

  const Ranks& ranks_;
  RunSetup setup_;
  std::optional<SequenceData> data_, eval_data_;
  RunStart start_;
  uint64_t total_steps_ = 0;
  std::vector<LrSchedule> schedules_;  ///< learning_rate's, then those of lr_groups
  OptimizerSettings rule_;
  PageStore store_;
  std::unique_ptr<GpuGroups> gpu_groups_;  ///< of several ranks with GPUs
  Executor executor_;
  std::map<std::array<uint32_t, 5>, Program> programs_;
  std::vector<int32_t> tokens_, targets_, document_begins_;
  std::vector<double>
      trained_;  ///< of marked data, per micro-batch of all ranks in the data's order
  StepContext context_;

  TrainingPosition position_;
  std::optional<UpdateStep> pending_;
  bool resumed_in_place_ = false;  ///< from a checkpoint of this output_dir
  uint32_t non_finite_in_row_ = 0;
  const std::atomic<bool>* stop_ = nullptr;  ///< this process's wish
  bool stopping_ = false;                    ///< what the ranks have agreed on
  std::unique_ptr<MetricsFile> metrics_;
  std::unique_ptr<Progress> progress_;
  RunReport report_;
  StepOutcome last_;
  StepExpectations expectations_;
};

/// "predicted step time 12.3 s (profile): ..." of a Program, by the simulator.
std::string describe_prediction(const Program& program, const CostModel& costs);

/// The end-of-run summary for people: losses, where state lived, bytes, memory, files.
std::string describe_report(const RunReport& report, const RunSetup& setup);

}  // namespace overspill
