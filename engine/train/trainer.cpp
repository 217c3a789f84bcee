// The loop. Policy about *what* to run when; how a step runs is its Program.
#include "engine/train/trainer.h"

#include <chrono>
#include <cmath>
#include <numeric>

#include "engine/base/error.h"
#include "engine/base/log.h"
#include "engine/base/units.h"
#include "engine/model/kernels.h"
#include "engine/plan/planner.h"
#include "engine/program/verify.h"
#include "engine/train/file_hashes.h"
#include "engine/train/model_state.h"
#include "engine/train/step_decision.h"

namespace overspill {
namespace {

namespace fs = std::filesystem;

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void log_plan(const Layout& layout) {
  const PlanOptions& o = layout.options;
  log_info("{} parameters; device {} of {}, host {} of {}, nvme {}; prefetch depth {}",
           format_count(layout.model.parameters()), format_bytes(layout.device_bytes),
           format_bytes(o.device_memory), format_bytes(layout.host_bytes),
           format_bytes(o.host_memory), format_bytes(layout.nvme_bytes), layout.prefetch_depth);
  if (o.world() > 1) log_info("{}", describe_sharing(o));
}

}  // namespace

const Ranks& Trainer::alone() {
  static const Ranks one;
  return one;
}

Trainer::Trainer(const TrainConfig& config, const Ranks& ranks)
    : ranks_(ranks),
      setup_(config, ranks),
      data_(open_sequences(setup_, false)),
      start_(find_start(setup_, ranks)),
      store_(setup_.layout, store_options(setup_.config.offload, setup_.gpu)),
      gpu_groups_(make_gpu_groups(setup_.config, ranks, store_.device(),
                                  store_.address(setup_.layout.scratch, setup_.scratch_bytes()))),
      executor_(store_, *setup_.state, setup_.layers.get(), setup_.lane_cpus(), groups()),
      expectations_(setup_.layout, setup_.config.offload.hardware_profile) {
  std::byte* const scratch = store_.address(setup_.layout.scratch);
  setup_.layers->attach(store_.device(), scratch);
  setup_.state->attach(store_.device(), scratch + setup_.layers->scratch_bytes());
  for (const DatasetConfig& dataset : config.datasets) {
    if (dataset.evaluation && !eval_data_) eval_data_.emplace(open_sequences(setup_, true));
  }
  const double epoch_steps =
      static_cast<double>(data_->size()) / static_cast<double>(sequences_per_step());
  total_steps_ = config.max_steps.value_or(
      static_cast<uint64_t>(std::max(1.0, std::floor(config.num_epochs * epoch_steps))));
  uint64_t warmup = config.warmup_steps.value_or(0);
  if (config.warmup_ratio) {
    warmup =
        static_cast<uint64_t>(std::ceil(*config.warmup_ratio * static_cast<double>(total_steps_)));
  }
  schedules_ = {{config.lr_scheduler, config.learning_rate, warmup, total_steps_}};
  for (const LrGroup& group : config.lr_groups) {
    schedules_.push_back({config.lr_scheduler, group.learning_rate, warmup, total_steps_});
  }
  require_alike({{"config.json", text_hash(setup_.model.config.source.dump())},
                 {"number of training sequences", data_->size()},
                 {"number of evaluation sequences", eval_data_ ? eval_data_->size() : 0},
                 {"number of steps", total_steps_}},
                ranks_);
  rule_ = setup_.layout.options.update_rule();
  const size_t step_tokens = setup_.batch.tokens() * config.gradient_accumulation_steps;
  tokens_.resize(step_tokens);
  targets_.resize(step_tokens);
  document_begins_.resize(step_tokens);
  log_plan(setup_.layout);
  for (const std::string& line : describe_parameter_groups(setup_.model, config.lr_groups)) {
    log_info("{}", line);
  }
  require_shared_output(config.output_dir, ranks_);
  if (ranks_.first()) remove_partial_checkpoints(config.output_dir);
  load(start_);
  start_ = {};
}

void Trainer::load(const RunStart& start) {
  if (start.checkpoint) {
    load_checkpoint(store_, *start.checkpoint);
    position_ = start.checkpoint->position;
    resumed_in_place_ =
        fs::equivalent(start.checkpoint->directory.parent_path(), setup_.config.output_dir);
    log_info("resumed from {} at step {}", start.checkpoint->directory.string(), position_.step);
    return;
  }
  const TrainConfig& config = setup_.config;
  position_.seed = config.seed;
  position_.shuffle = config.shuffle;
  position_.sequence_len = config.sequence_len;
  if (start.model) {
    load_weights(store_, *start.model);
  } else {
    initialize_weights(store_, config.seed);
  }
}

uint64_t Trainer::own_sequences_per_step() const {
  return uint64_t{setup_.config.micro_batch_size} * setup_.config.gradient_accumulation_steps;
}

const Program& Trainer::program(const StepKind& kind) {
  const std::array<uint32_t, 5> key = {kind.forward, kind.backward, kind.pending_update,
                                       kind.moments_zero, kind.micro_batches};
  const auto found = programs_.find(key);
  if (found != programs_.end()) return found->second;
  Program planned = plan_step(setup_.layout, kind);
  verify_program(planned, setup_.layout);
  require_same_collectives(planned, ranks_);
  return programs_.emplace(key, std::move(planned)).first->second;
}

StepContext& Trainer::context(uint32_t micro_batches) {
  context_.tokens = tokens_;
  context_.targets = targets_;
  context_.document_begins = {};
  if (!trained_.empty()) context_.document_begins = document_begins_;
  const double trained = trained_tokens(size_t{micro_batches} * ranks_.size());
  context_.loss_scale = 1.0f / static_cast<float>(std::max(1.0, trained));
  context_.losses.assign(micro_batches, 0.0);
  context_.gradient_squares.assign(setup_.model.layers.size(), 0.0);
  context_.non_finite = false;
  return context_;
}

void Trainer::fill_batch(const SequenceData& data, uint64_t cursor, uint32_t micro_batches) {
  const uint64_t length = setup_.batch.sequence_len;
  for (uint64_t i = 0; i < micro_batches * setup_.batch.sequences; ++i) {
    const auto sequence = [&](std::vector<int32_t>& all) {
      return std::span(all).subspan(i * length, length);
    };
    data.get(cursor + i, sequence(tokens_), sequence(targets_), sequence(document_begins_));
  }
  trained_.clear();
  if (!data.marked()) return;
  const auto tokens = static_cast<ptrdiff_t>(setup_.batch.tokens());
  std::vector<double> own;
  for (auto first = targets_.begin(); own.size() < micro_batches; first += tokens) {
    own.push_back(static_cast<double>(tokens - std::count(first, first + tokens, kNotTrained)));
  }
  trained_ = ranks_.gather(std::span<const double>(own));
}

double Trainer::trained_tokens(size_t micro_batches) const {
  if (trained_.empty()) return static_cast<double>(setup_.batch.tokens() * micro_batches);
  const size_t given = std::min(micro_batches, trained_.size());
  return std::accumulate(trained_.begin(), trained_.begin() + static_cast<ptrdiff_t>(given), 0.0);
}

Trace Trainer::execute(const Program& program, StepContext& context) {
  Trace trace = executor_.run(program, context);
  const TraceSummary summary = summarize(program, trace);
  for (size_t lane = 0; lane < kLanes; ++lane) report_.lane_bytes[lane] += summary.bytes[lane];
  return trace;
}

UpdateStep Trainer::next_update(double gradient_scale) const {
  std::vector<double> rates;
  for (const LrSchedule& schedule : schedules_) rates.push_back(schedule.at(position_.step));
  return update_step(rule_, rates, position_.updates + 1, gradient_scale);
}

Trainer::StepOutcome Trainer::train_step() {
  const TrainConfig& config = setup_.config;
  const uint32_t micro_batches = config.gradient_accumulation_steps;
  const bool in_backward = config.offload.update == UpdateTiming::in_backward;
  StepOutcome outcome;
  outcome.learning_rate = schedules_[0].at(position_.step);
  fill_batch(*data_, position_.cursor + ranks_.rank() * own_sequences_per_step(), micro_batches);
  StepContext& step = context(micro_batches);
  const auto trained = static_cast<uint64_t>(trained_tokens(trained_.size()));
  if (!trained_.empty()) outcome.trained_tokens = trained;
  step.non_finite = outcome.trained_tokens == 0u;  // nothing of this step is applied
  const bool updates = in_backward || pending_;
  if (in_backward) {
    step.update = next_update(1.0);
  } else if (pending_) {
    step.update = *pending_;
  }
  outcome.program = &program(
      {true, true, pending_.has_value(), updates && position_.updates == 0, micro_batches});
  outcome.trace = execute(*outcome.program, step);
  if (pending_) ++position_.updates;
  pending_.reset();
  const StepResults results = share_results(step, stop_ != nullptr && *stop_, ranks_);
  stopping_ = results.stop;
  decide_update(outcome, results);
  ++position_.step;
  position_.cursor += sequences_per_step();
  position_.tokens += sequences_per_step() * setup_.batch.sequence_len;
  return outcome;
}

void Trainer::decide_update(StepOutcome& outcome, const StepResults& step) {
  const TrainConfig& config = setup_.config;
  const double squares = step.square_sum();
  const double trained = trained_tokens(step.losses.size());
  // Null in the metrics where no token is trained on.
  outcome.loss = trained > 0 ? step.loss_sum() / trained : std::nan("");
  const StepDecision decision = decide_step(squares, step.non_finite, config.max_grad_norm);
  outcome.grad_norm = decision.grad_norm;
  if (outcome.trained_tokens == 0u) {
    outcome.skipped = true;
    ++report_.skipped_updates;
    if (!ranks_.first()) return;
    log_warning(
        "step {}: no token is trained on, by the loss masks of its sequences: update skipped",
        position_.step + 1);
    return;
  }
  const bool finite = decision.finite && std::isfinite(outcome.loss);
  const bool in_backward = config.offload.update == UpdateTiming::in_backward;
  if (finite) {
    non_finite_in_row_ = 0;
    if (in_backward) {
      ++position_.updates;
      return;
    }
    pending_ = next_update(decision.clip_factor);
    advance_moments(store_, *pending_, *groups().shard);
    return;
  }
  outcome.skipped = true;
  ++report_.skipped_updates;
  const std::string what = std::isfinite(outcome.loss) ? "gradient" : "loss";
  const double top = step.gradient_squares[setup_.model.highest_trainable()];  // updated first
  if (in_backward && std::isfinite(outcome.loss) && std::isfinite(top)) {
    fail(ErrorCode::non_finite,
         "step {}: non-finite gradient after layers above it were already updated (update: "
         "in_backward "
         "cannot undo them); resume from the last checkpoint with update: next_forward",
         position_.step + 1);
  }
  if (++non_finite_in_row_ >= config.max_non_finite_steps) {
    fail(ErrorCode::non_finite,
         "step {}: non-finite {}, {} steps in a row (max_non_finite_steps: {}); lower "
         "learning_rate or check the data, then resume from the last checkpoint",
         position_.step + 1, what, non_finite_in_row_, config.max_non_finite_steps);
  }
  if (!ranks_.first()) return;  // all ranks skip it
  log_warning("step {}: non-finite {}: update skipped ({} in a row)", position_.step + 1, what,
              non_finite_in_row_);
}

void Trainer::flush() {
  if (!pending_) return;
  const uint32_t micro_batches = setup_.config.gradient_accumulation_steps;
  StepContext& step = context(micro_batches);
  step.update = *pending_;
  execute(program({false, false, true, position_.updates == 0, micro_batches}), step);
  ++position_.updates;
  pending_.reset();
}

/// Nothing where the evaluated sequences have no trained token.
std::optional<double> Trainer::evaluate() {
  flush();
  const uint32_t per_batch = setup_.config.micro_batch_size, ranks = ranks_.size();
  const uint64_t wanted = std::min<uint64_t>(setup_.config.eval_sequences, eval_data_->size());
  const uint64_t batches = std::max<uint64_t>(1, wanted / per_batch);
  double loss = 0, trained = 0;
  for (uint64_t done = 0; done < batches;) {
    const auto each = static_cast<uint32_t>(std::min<uint64_t>(
        ceil_div(batches - done, ranks), setup_.config.gradient_accumulation_steps));
    // The last round may have more places than batches: sequences go on, and do not count.
    fill_batch(*eval_data_, (done + uint64_t{ranks_.rank()} * each) * per_batch, each);
    StepContext& step = context(each);
    execute(program({true, false, false, false, each}), step);
    const StepResults results = share_results(step, false, ranks_);
    trained += trained_tokens(std::min<uint64_t>(results.losses.size(), batches - done));
    for (size_t i = 0; i < results.losses.size() && done < batches; ++i, ++done) {
      loss += results.losses[i];
    }
  }
  return trained > 0 ? std::optional(loss / trained) : std::nullopt;
}

void Trainer::evaluate_and_log() {
  const std::optional<double> loss = evaluate();
  if (!loss) {
    if (!ranks_.first()) return;
    log_warning(
        "step {}: no eval_loss: no token of the evaluated sequences counts, by their loss masks; "
        "raise eval_sequences (now {}), or give another evaluation dataset",
        position_.step, setup_.config.eval_sequences);
    return;
  }
  if (!report_.evaluated) report_.first_eval_loss = *loss;
  report_.evaluated = true;
  report_.last_eval_loss = *loss;
  if (!ranks_.first()) return;
  metrics_->write({{"step", position_.step}, {"eval_loss", *loss}});
  progress_->note(fmt::format("step {}  eval_loss {:.4f}", position_.step, *loss));
}

void Trainer::save() {
  flush();
  const TrainConfig& config = setup_.config;
  report_.checkpoint = save_checkpoint(store_, position_,
                                       {.output_dir = config.output_dir,
                                        .source_model = setup_.model_path(),
                                        .total_limit = config.save_total_limit,
                                        .only_model = config.save_only_model},
                                       ranks_);
}

std::vector<TraceSummary> Trainer::time_steps(uint32_t steps, const std::atomic<bool>& stop) {
  constexpr uint32_t kSettle = 3;
  std::vector<TraceSummary> timed;
  for (uint32_t i = 0; i < kSettle + steps && !stop; ++i) {
    const StepOutcome outcome = train_step();
    if (i >= kSettle) timed.push_back(summarize(*outcome.program, outcome.trace));
  }
  return timed;
}

RunReport Trainer::run(const std::atomic<bool>& stop) {
  const TrainConfig& config = setup_.config;
  if (ranks_.first()) {
    metrics_ = std::make_unique<MetricsFile>(config.output_dir / "metrics.jsonl", position_.step);
    progress_ = std::make_unique<Progress>(total_steps_, config.logging_steps);
  }
  stop_ = &stop;
  stopping_ = share_results({}, stop, ranks_).stop;
  if (position_.step < total_steps_) log_prediction();
  const auto start = std::chrono::steady_clock::now();
  // A run that was resumed at its end has nothing to do, and nothing to save again.
  uint64_t saved_step = resumed_in_place_ ? position_.step : UINT64_MAX;
  uint64_t evaluated_step = saved_step;
  while (position_.step < total_steps_ && !stopping_) {
    if (last_.program != nullptr) expectations_.learn(*last_.program, last_.trace);
    last_ = train_step();
    log_step(last_);
    if (report_.steps++ == 0 || std::isnan(report_.first_loss)) report_.first_loss = last_.loss;
    if (last_.trained_tokens != 0u) report_.last_loss = last_.loss;
    if (eval_data_ && config.eval_steps > 0 && position_.step % config.eval_steps == 0) {
      evaluate_and_log();
      evaluated_step = position_.step;
    }
    if (config.save_steps > 0 && position_.step % config.save_steps == 0) {
      save();
      saved_step = position_.step;
    }
  }
  report_.interrupted = stopping_ && position_.step < total_steps_;
  if (eval_data_ && !report_.interrupted && evaluated_step != position_.step) evaluate_and_log();
  if (saved_step != position_.step) save();
  report_.seconds = seconds_since(start);
  finish_report();
  progress_.reset();
  return report_;
}

}  // namespace overspill
