// The forecast as a page of text.
#include <fmt/format.h>

#include "engine/base/units.h"
#include "engine/forecast/forecast_report.h"

namespace overspill {
namespace {

double percent(double part, double whole) { return whole > 0 ? 100 * part / whole : 0; }

std::string head(const ForecastRequest& request, const Forecast& f) {
  const PlanOptions& o = request.options;
  const HardwareProfile& hw = request.hardware;
  return fmt::format(
      "model          {} parameters in {} layers\n"
      "hardware       {}{}\n"
      "step           {} tokens: {} rank{} x {} micro-batch{} of {} tokens\n",
      format_count(request.model.parameters()), request.model.layers.size(),
      hw.name.empty() ? "defaults (no profile given)" : hw.name,
      o.world() > 1 ? "; " + describe_sharing(o) : "", static_cast<uint64_t>(f.tokens_per_step),
      o.world(), o.world() == 1 ? "" : "s", o.micro_batches, o.micro_batches == 1 ? "" : "es",
      o.micro_batch_tokens);
}

/// "-" for nothing.
std::string size_text(uint64_t bytes) { return bytes == 0 ? "-" : format_bytes(bytes); }

std::string tiers(const Forecast& f) {
  constexpr const char* kRow = "{:<14} {:<11} {:>11} {:>11} {:>11} {:>11} {:>11} {:>11} {:>11}\n";
  std::string text =
      fmt::format(kRow, "fits", f.layout.options.world() > 1 ? "(each rank)" : "", "used", "budget",
                  "weights", "optimizer", "gradients", "activations", "buffers");
  for (const Tier tier : {Tier::device, Tier::host, Tier::nvme}) {
    const TierUse use = tier_use(f.layout, tier);
    text += fmt::format(kRow, "", tier_name(tier), size_text(use.used),
                        use.budget == UINT64_MAX ? "as needed" : format_bytes(use.budget),
                        size_text(use.weights), size_text(use.optimizer), size_text(use.gradients),
                        size_text(use.activations), size_text(use.buffers));
  }
  return text;
}

std::string schedule(const Layout& layout) {
  const size_t twice = layout.layers_updated_twice().size();
  const bool in_backward = layout.options.update == UpdateTiming::in_backward;
  return fmt::format("schedule       loads run {} layer{} ahead; updates in the {}{}\n",
                     layout.prefetch_depth, layout.prefetch_depth == 1 ? "" : "s",
                     in_backward ? "backward" : "next forward",
                     twice > 0 ? fmt::format(", twice for {} layers", twice) : "");
}

std::string lanes(const Forecast& f) {
  std::string text = "lanes          busy              bytes a step\n";
  for (size_t i = 0; i < kLanes; ++i) {
    const double busy = f.summary.busy_seconds[i];
    if (busy <= 0) continue;
    const uint64_t bytes = f.summary.bytes[i];
    text += fmt::format("  {:<12} {:>9} {:>5.1f} %   {}{}\n", lane_name(static_cast<Lane>(i)),
                        format_seconds(busy), percent(busy, f.seconds()),
                        bytes > 0 ? format_bytes(bytes) : "",
                        static_cast<Lane>(i) == f.bottleneck ? "  <- busiest" : "");
  }
  return text;
}

/// "use 3.2 % of it", "use it up 371 times".
std::string share_text(double share) {
  if (share >= 10) return fmt::format("use it up {:.0f} times", share);
  return share >= 0.1 ? fmt::format("use {:.0f} % of it", 100 * share)
                      : fmt::format("use {:.2g} % of it", 100 * share);
}

std::string wear(const ForecastRequest& request, const Forecast& f) {
  if (f.written_per_step == 0) return "drives         nothing is written in a step\n";
  std::string text = fmt::format("drives         {} written a step by all ranks",
                                 format_bytes(f.written_per_step));
  if (f.life_days) {
    text += fmt::format("; their endurance of {:.6g} TB lasts {} of training",
                        static_cast<double>(request.hardware.drives.endurance) * 1e-12,
                        format_seconds(*f.life_days * 86400));
  } else {
    text += "; their endurance is not in the profile (drives.endurance)";
  }
  if (f.life_share) {
    text += fmt::format("; this run's {} steps {}", *request.steps, share_text(*f.life_share));
  }
  return text + "\n";
}

std::string advice_text(const TriedAdvice& tried) {
  if (!tried) return "";
  if (tried->empty()) return "advice         nothing tried gains a percent\n";
  std::string text = "advice         tokens/s   step      what to change\n";
  for (const Advice& a : *tried) {
    text += fmt::format("               {:>+7.1f} % {:>8}   {}{}\n", 100 * (a.gain - 1),
                        format_seconds(a.seconds), a.change, a.setting ? "" : " (hardware)");
  }
  return text;
}

}  // namespace

std::string forecast_text(const ForecastRequest& request, const Forecast& f,
                          const TriedAdvice& advice) {
  const double run = request.steps ? f.seconds() * static_cast<double>(*request.steps) : 0;
  return head(request, f) + tiers(f) + schedule(f.layout) +
         fmt::format(
             "predicted      {} a step, {:.4g} tokens/s{}; busiest lane {}\n",
             format_seconds(f.seconds()), f.tokens_per_second(),
             run > 0 ? fmt::format(", {} for {} steps", format_seconds(run), *request.steps) : "",
             lane_name(f.bottleneck)) +
         fmt::format("speed of light {} a step ({}): the plan reaches {:.0f} %\n",
                     format_seconds(f.light.seconds), f.light.resource,
                     percent(f.light.seconds, f.seconds())) +
         lanes(f) + wear(request, f) +
         fmt::format("load, save     {} to load, {} for a checkpoint on the same drives\n",
                     format_seconds(f.load_seconds), format_seconds(f.save_seconds)) +
         advice_text(advice);
}

}  // namespace overspill
