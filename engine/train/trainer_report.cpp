// What the trainer says of its steps: metrics, the progress line, traces and the final line. The
// first rank speaks for all.
#include "engine/base/log.h"
#include "engine/base/units.h"
#include "engine/run/simulator.h"
#include "engine/train/trainer.h"

namespace overspill {

namespace fs = std::filesystem;

void Trainer::log_step(const StepOutcome& outcome) {
  if (!ranks_.first()) return;
  const TraceSummary summary = summarize(*outcome.program, outcome.trace);
  const uint64_t step_tokens = sequences_per_step() * setup_.batch.sequence_len;
  const double rate = static_cast<double>(step_tokens) / std::max(1e-9, summary.seconds);
  const Layout& layout = setup_.layout;
  nlohmann::json line = {{"step", position_.step},
                         {"loss", outcome.loss},
                         {"grad_norm", outcome.grad_norm},
                         {"learning_rate", outcome.learning_rate},
                         {"update_skipped", outcome.skipped},
                         {"tokens", position_.tokens},
                         {"tokens_per_second", rate},
                         {"step_seconds", summary.seconds},
                         {"flops", summary.flops},
                         {"lane_busy_seconds", lane_object(summary.busy_seconds)},
                         {"stall_seconds", lane_object(summary.stall_seconds)},
                         {"lane_bytes", lane_object(summary.bytes)},
                         {"host_memory_peak", layout.host_bytes},
                         {"device_memory_peak", layout.device_bytes}};
  if (outcome.trained_tokens) line["trained_tokens"] = *outcome.trained_tokens;
  const StepExpectation* expected = expectations_.of(*outcome.program);
  if (expected != nullptr) line["predicted"] = expectation_object(*expected);
  metrics_->write(line);
  progress_->step({.step = position_.step,
                   .loss = outcome.loss,
                   .grad_norm = outcome.grad_norm,
                   .learning_rate = outcome.learning_rate,
                   .tokens_per_second = rate,
                   .seconds = summary.seconds,
                   .light_seconds = expected == nullptr ? 0 : expected->light.seconds});
}

void Trainer::log_prediction() {
  const TrainConfig& config = setup_.config;
  const bool next_forward = config.offload.update == UpdateTiming::next_forward;
  // On every rank: Programs are compared when they are planned.
  const Program& steady =
      program({true, true, next_forward, false, config.gradient_accumulation_steps});
  if (!config.offload.hardware_profile || !ranks_.first()) return;
  log_info("{}", describe_prediction(steady, expectations_.usual()));
}

void Trainer::finish_report() {
  const Layout& layout = setup_.layout;
  const fs::path& directory = setup_.config.output_dir;
  if (last_.program != nullptr) {
    const CostModel costs = expectations_.costs_of(*last_.program, last_.trace);
    const Trace predicted = simulate(*last_.program, costs);
    report_.predicted_step_seconds = static_cast<double>(predicted.end_ns()) * 1e-9;
    report_.measured_step_seconds = static_cast<double>(last_.trace.end_ns()) * 1e-9;
    const std::string which = ranks_.first() ? "" : fmt::format("-rank{}", ranks_.rank());
    report_.trace = directory / fmt::format("trace{}.json", which);
    report_.predicted_trace = directory / fmt::format("trace-predicted{}.json", which);
    const std::string name = fmt::format("overspill step {}", position_.step);
    write_trace(report_.trace, *last_.program, layout, last_.trace, name);
    write_trace(report_.predicted_trace, *last_.program, layout, predicted, name + " (predicted)");
  }
  report_.peak_resident = peak_resident_bytes();
  if (!ranks_.first()) return;
  metrics_->write({{"final", true},
                   {"step", position_.step},
                   {"interrupted", report_.interrupted},
                   {"steps", report_.steps},
                   {"tokens", position_.tokens},
                   {"seconds", report_.seconds},
                   {"first_loss", report_.first_loss},
                   {"last_loss", report_.last_loss},
                   {"skipped_updates", report_.skipped_updates},
                   {"lane_bytes", lane_object(report_.lane_bytes)},
                   {"predicted_step_seconds", report_.predicted_step_seconds},
                   {"measured_step_seconds", report_.measured_step_seconds},
                   {"host_memory_peak", layout.host_bytes},
                   {"device_memory_peak", layout.device_bytes},
                   {"nvme_bytes", layout.nvme_bytes},
                   {"peak_rss", report_.peak_resident},
                   {"checkpoint", report_.checkpoint.string()}});
}

}  // namespace overspill
