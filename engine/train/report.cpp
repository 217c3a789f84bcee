// The end-of-run summary.
#include <fmt/format.h>

#include "engine/base/units.h"
#include "engine/run/simulator.h"
#include "engine/train/trainer.h"

namespace overspill {
namespace {

std::string state_line(const Layout& layout, PageKind kind, const char* name) {
  std::string text = fmt::format("  {:<12}", name);
  bool any = false;
  for (const Tier tier : {Tier::device, Tier::host, Tier::nvme}) {
    const uint64_t bytes = layout.home_bytes(kind, tier);
    if (bytes == 0) continue;
    text += fmt::format("{}{} on {}", any ? ", " : "", format_bytes(bytes), tier_name(tier));
    any = true;
  }
  return text + (any ? "\n" : "consumed at once\n");
}

std::string budget_line(const char* name, uint64_t used, uint64_t budget) {
  return fmt::format("  {:<12}{} of {} ({:.0f} %)\n", name, format_bytes(used),
                     format_bytes(budget),
                     100.0 * static_cast<double>(used) / static_cast<double>(budget));
}

}  // namespace

std::string describe_prediction(const Program& program, const CostModel& costs) {
  const TraceSummary summary = summarize(program, simulate(program, costs));
  std::string text =
      fmt::format("predicted step time {} (profile)", format_seconds(summary.seconds));
  for (size_t lane = 0; lane < kLanes; ++lane) {
    if (summary.busy_seconds[lane] <= 0) continue;
    text += fmt::format("; {} busy {}", lane_name(static_cast<Lane>(lane)),
                        format_seconds(summary.busy_seconds[lane]));
  }
  return text;
}

std::string describe_report(const RunReport& report, const RunSetup& setup) {
  const Layout& layout = setup.layout;
  const PlanOptions& o = layout.options;
  std::string text =
      fmt::format("\n{} after {} steps in {}\n", report.interrupted ? "interrupted" : "finished",
                  report.steps, format_seconds(report.seconds));
  text += fmt::format("loss           {:.4f} -> {:.4f}\n", report.first_loss, report.last_loss);
  if (report.evaluated) {
    text += fmt::format("eval_loss      {:.4f} -> {:.4f}\n", report.first_eval_loss,
                        report.last_eval_loss);
  }
  if (o.world() > 1) {
    text += fmt::format("ranks          {}; what follows is rank 0's part\n", describe_sharing(o));
  }
  text += fmt::format("state of {} parameters lived in\n", format_count(setup.model.parameters()));
  text += state_line(layout, PageKind::weight, "weights");
  text += state_line(layout, PageKind::optimizer, "optimizer");
  text += state_line(layout, PageKind::gradient, "gradients");
  text += state_line(layout, PageKind::activation, "activations");
  text += "bytes moved\n";
  for (size_t lane = 0; lane < kLanes; ++lane) {
    if (report.lane_bytes[lane] == 0) continue;
    text += fmt::format("  {:<12}{}\n", lane_name(static_cast<Lane>(lane)),
                        format_bytes(report.lane_bytes[lane]));
  }
  text += "memory, peak of budget\n";
  text += budget_line("device", layout.device_bytes, o.device_memory);
  text += budget_line("host", layout.host_bytes, o.host_memory);
  text += fmt::format("  {:<12}{} in swap files\n", "nvme", format_bytes(layout.nvme_bytes));
  text +=
      fmt::format("  {:<12}{} resident at most\n", "process", format_bytes(report.peak_resident));
  if (report.measured_step_seconds > 0) {
    text += fmt::format("last step      {} measured, {} predicted\n",
                        format_seconds(report.measured_step_seconds),
                        format_seconds(report.predicted_step_seconds));
    text +=
        fmt::format("trace          {} (open in https://ui.perfetto.dev)\n", report.trace.string());
  }
  text += fmt::format("checkpoint     {}\n", report.checkpoint.string());
  return text;
}

}  // namespace overspill
