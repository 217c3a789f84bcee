// The forecast as one HTML page: a step's timeline, the tiers, the tables.
#include <fmt/format.h>

#include <algorithm>

#include "engine/base/units.h"
#include "engine/bench/html_page.h"
#include "engine/bench/svg_plot.h"
#include "engine/forecast/forecast_report.h"

namespace overspill {
namespace {

constexpr const char* kStyle =
    "<style>pre{background:#f7f7f7;padding:1em;overflow-x:auto;font-size:13px;line-height:1.45}"
    ".key span{display:inline-block;width:.9em;height:.9em;margin:0 .3em 0 1em}</style>\n";

/// Colours that the colour-blind tell apart (Okabe and Ito 2008).
const char* colour(OpKind kind) {
  switch (kind) {
    case OpKind::read: return "#0072b2";
    case OpKind::write: return "#d55e00";
    case OpKind::copy_to_device: return "#56b4e9";
    case OpKind::copy_to_host: return "#e69f00";
    case OpKind::forward:
    case OpKind::score: return "#7fc8a9";
    case OpKind::loss: return "#004d3a";
    case OpKind::backward: return "#009e73";
    case OpKind::update: return "#cc79a7";
    case OpKind::all_gather: return "#8c6bb1";
    case OpKind::reduce_scatter:
    case OpKind::all_reduce:
    case OpKind::agree: return "#4d004b";
    case OpKind::reduce_gradient:
    case OpKind::export_gradient: return "#999999";
  }
  return "#000";
}

constexpr size_t kBins = 800;
constexpr int kLeft = 90, kRow = 26;

/// Part of each bin of time in which the lane is busy, and with what most.
struct Strip {
  std::array<double, kBins> busy{};
  std::array<std::array<double, kOpKinds>, kBins> by_kind{};
};

Strip make_strip(const Forecast& f, Lane lane) {
  Strip strip;
  const double width = static_cast<double>(f.trace.end_ns()) / kBins;
  for (size_t i = 0; i < f.program.ops.size(); ++i) {
    const Op& op = f.program.ops[i];
    const Trace::Event& event = f.trace.events[i];
    if (op.lane != lane || event.end_ns == event.begin_ns) continue;
    const auto begin = static_cast<double>(event.begin_ns) / width;
    const auto end = static_cast<double>(event.end_ns) / width;
    for (auto bin = static_cast<size_t>(begin); bin < kBins && static_cast<double>(bin) < end;
         ++bin) {
      const auto left = static_cast<double>(bin);
      const double part = std::min(end, left + 1) - std::max(begin, left);
      strip.busy[bin] += part;
      strip.by_kind[bin][static_cast<size_t>(op.kind)] += part;
    }
  }
  return strip;
}

OpKind most(const std::array<double, kOpKinds>& parts) {
  return static_cast<OpKind>(std::ranges::max_element(parts) - parts.begin());
}

std::string lane_row(const Forecast& f, Lane lane, int y) {
  const Strip strip = make_strip(f, lane);
  std::string svg =
      fmt::format("<text x=\"0\" y=\"{}\">{}</text>\n", y + kRow - 10, lane_name(lane));
  for (size_t bin = 0; bin < kBins; ++bin) {
    const double busy = std::min(1.0, strip.busy[bin]);
    if (busy < 0.01) continue;
    const double height = busy * (kRow - 4);
    svg +=
        fmt::format("<rect x=\"{}\" y=\"{:.1f}\" width=\"1.05\" height=\"{:.1f}\" fill=\"{}\"/>",
                    kLeft + bin, y + kRow - 4 - height, height, colour(most(strip.by_kind[bin])));
  }
  return svg + "\n";
}

std::string timeline(const Forecast& f) {
  int y = 4;
  std::string rows;
  for (size_t lane = 0; lane < kLanes; ++lane) {
    if (f.summary.busy_seconds[lane] <= 0) continue;
    rows += lane_row(f, static_cast<Lane>(lane), y);
    y += kRow;
  }
  for (int tick = 0; tick <= 4; ++tick) {
    const int x = kLeft + tick * static_cast<int>(kBins) / 4;
    rows += fmt::format(
        "<line class=\"grid\" x1=\"{0}\" y1=\"0\" x2=\"{0}\" y2=\"{1}\"/><text x=\"{0}\" y=\"{2}\" "
        "text-anchor=\"{3}\">{4}</text>\n",
        x, y, y + 14, tick == 4 ? "end" : "middle", format_seconds(f.seconds() * tick / 4));
  }
  std::string key;
  for (size_t k = 0; k < kOpKinds; ++k) {
    const auto kind = static_cast<OpKind>(k);
    const bool used =
        std::ranges::any_of(f.program.ops, [=](const Op& op) { return op.kind == kind; });
    if (used) {
      key += fmt::format("<span style=\"background:{}\"></span>{}", colour(kind), op_name(kind));
    }
  }
  return fmt::format(
      "<svg viewBox=\"0 0 {} {}\" role=\"img\" aria-label=\"timeline\">\n{}</svg>\n<p "
      "class=\"key\">{}</p>\n"
      "<p>The height of a mark is the part of its time in which the lane is busy.</p>\n",
      kLeft + kBins + 4, y + 20, rows, key);
}

std::string tier_map(const Layout& layout) {
  std::string html = "<div class=\"plots\">\n";
  for (const Tier tier : {Tier::device, Tier::host, Tier::nvme}) {
    BarPlot plot{.title = std::string(tier_name(tier)),
                 .x_title = "",
                 .y_title = "GiB",
                 .parts = {"GiB"},
                 .bars = {}};
    const auto bar = [&](const char* name, uint64_t bytes) {
      plot.bars.push_back({.label = name, .parts = {static_cast<double>(bytes) / kGiB}});
    };
    const TierUse use = tier_use(layout, tier);
    if (use.used == 0) continue;
    bar("weights", use.weights);
    bar("optimizer", use.optimizer);
    bar("gradients", use.gradients);
    bar("activations", use.activations);
    bar("buffers", use.buffers);
    html += draw(plot);
  }
  return html + "</div>\n";
}

}  // namespace

std::string forecast_html(const ForecastRequest& request, const Forecast& f,
                          const TriedAdvice& advice) {
  const std::string where = request.options.world() > 1 ? ", on each rank" : "";
  return html_page("Overspill: forecast", "A step, predicted",
                   kStyle + ("<pre>" + html_escaped(forecast_text(request, f, advice))) +
                       "</pre>\n<h2>Timeline of a step</h2>\n" + timeline(f) +
                       "<h2>What lives where" + where + "</h2>\n" + tier_map(f.layout));
}

}  // namespace overspill
