// The forecast as a page of text.
#include <fmt/format.h>

#include "engine/base/units.h"
#include "engine/forecast/forecast_report.h"

namespace overspill {
namespace {

constexpr std::array<std::pair<PageKind, const char*>, 4> kKinds = {
    {{PageKind::weight, "weights"},
     {PageKind::optimizer, "optimizer"},
     {PageKind::gradient, "gradients"},
     {PageKind::activation, "activations"}}};

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
      o.ranks > 1 ? fmt::format("; {} ranks share each layer's parameters (ZeRO-3)", o.ranks) : "",
      static_cast<uint64_t>(f.tokens_per_step), o.ranks, o.ranks == 1 ? "" : "s", o.micro_batches,
      o.micro_batches == 1 ? "" : "es", o.micro_batch_tokens);
}

std::string tiers(const Forecast& f) {
  const Layout& layout = f.layout;
  const PlanOptions& o = layout.options;
  std::string text =
      fmt::format("fits           {:<12} {:>12} {:>14} {:>12} {:>12} {:>12} {:>12}\n",
                  o.ranks > 1 ? "(each rank)" : "", "used", "budget", "weights", "optimizer",
                  "gradients", "activations");
  const std::array<std::pair<uint64_t, uint64_t>, 3> sizes = {
      {{layout.device_bytes, o.device_memory},
       {layout.host_bytes, o.host_memory},
       {layout.nvme_bytes, o.nvme_capacity}}};
  for (const Tier tier : {Tier::device, Tier::host, Tier::nvme}) {
    const auto [used, budget] = sizes[static_cast<size_t>(tier)];
    text += fmt::format("               {:<12} {:>12} {:>14}", tier_name(tier), format_bytes(used),
                        budget == UINT64_MAX ? "as needed" : format_bytes(budget));
    for (const auto& [kind, name] : kKinds) {
      const uint64_t bytes = layout.home_bytes(kind, tier);
      text += fmt::format(" {:>12}", bytes == 0 ? "-" : format_bytes(bytes));
    }
    text += "\n";
  }
  return text;
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

std::string wear(const ForecastRequest& request, const Forecast& f) {
  if (f.written_per_step == 0) return "drives         nothing is written in a step\n";
  std::string text = fmt::format("drives         {} written a step by all ranks",
                                 format_bytes(f.written_per_step));
  if (f.life_days) {
    text += fmt::format("; their endurance of {} lasts {:.0f} days of training",
                        format_bytes(request.hardware.drives.endurance), *f.life_days);
  } else {
    text += "; their endurance is not in the profile (drives.endurance)";
  }
  if (f.life_share) {
    text += fmt::format("; this run's {} steps use {:.2g} % of it", *request.steps,
                        100 * *f.life_share);
  }
  return text + "\n";
}

std::string advice_text(std::span<const Advice> advice) {
  if (advice.empty()) return "advice         nothing tried gains a percent\n";
  std::string text = "advice         tokens/s   step      what to change\n";
  for (const Advice& a : advice) {
    text += fmt::format("               {:>+7.1f} % {:>8}   {}{}\n", 100 * (a.gain - 1),
                        format_seconds(a.seconds), a.change, a.setting ? "" : " (hardware)");
  }
  return text;
}

}  // namespace

std::string forecast_text(const ForecastRequest& request, const Forecast& f,
                          std::span<const Advice> advice) {
  const double run = request.steps ? f.seconds() * static_cast<double>(*request.steps) : 0;
  return head(request, f) + tiers(f) +
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
