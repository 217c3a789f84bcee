// Results of tuning for people and programs, and the training file that won.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "engine/base/units.h"
#include "engine/bench/html_page.h"
#include "engine/bench/svg_plot.h"
#include "engine/train/tuner.h"

namespace overspill {
namespace {

using Json = nlohmann::ordered_json;

std::string settings_text(const std::vector<std::string>& settings) {
  return settings.empty() ? "(the file as it is)" : fmt::format("{}", fmt::join(settings, " "));
}

BenchTable runs_table(const TuneReport& report) {
  BenchTable table{"Short runs: predicted beside measured",
                   {"settings", "predicted", "measured", "predicted/measured"},
                   {}};
  for (const TuneTrial& trial : report.measured) {
    table.rows.push_back({settings_text(trial.settings), format_seconds(trial.predicted),
                          format_seconds(*trial.measured),
                          fmt::format("{:.3f}", trial.predicted / *trial.measured)});
  }
  return table;
}

BenchTable predictions_table(const TuneReport& report) {
  BenchTable table{"Fastest in the simulator", {"settings", "predicted"}, {}};
  for (const TuneTrial& trial : report.best) {
    table.rows.push_back({settings_text(trial.settings), format_seconds(trial.predicted)});
  }
  return table;
}

std::string verdict(const TuneReport& report) {
  if (report.winner.settings.empty()) {
    return report.measured.empty() ? "nothing is predicted to beat the file as it is"
                                   : "nothing tried beats the file as it is by a percent";
  }
  const std::string settings = settings_text(report.winner.settings);
  if (report.measured.empty()) {
    const auto as_is = std::ranges::find_if(
        report.best, [](const TuneTrial& trial) { return trial.settings.empty(); });
    return fmt::format("{}: predicted {:.1f} % less time a step", settings,
                       100 * (1 - report.winner.predicted / as_is->predicted));
  }
  return fmt::format("{}: {:.1f} % less time a step", settings,
                     100 * (1 - *report.winner.measured / *report.measured.front().measured));
}

std::string depth_plot(const TuneReport& report) {
  BarPlot plot{.title = "Step time over prefetch depth (predicted)",
               .x_title = "offload.prefetch_depth",
               .y_title = "seconds",
               .parts = {"step"},
               .bars = {}};
  for (const auto& [depth, seconds] : report.by_depth) {
    plot.bars.push_back({.label = std::to_string(depth), .parts = {seconds}});
  }
  return draw(plot);
}

}  // namespace

std::string tune_text(const TuneReport& report) {
  std::string text = fmt::format("{} Programs simulated\n\n", report.simulated);
  text += table_text(predictions_table(report)) + "\n";
  if (!report.measured.empty()) text += table_text(runs_table(report)) + "\n";
  text += "prefetch depth ";
  double longest = 0;
  for (const auto& [depth, seconds] : report.by_depth) longest = std::max(longest, seconds);
  for (const auto& [depth, seconds] : report.by_depth) {
    const auto bar = static_cast<size_t>(40 * seconds / longest);
    text += fmt::format("{}{} {:<40} {}\n",
                        depth == report.by_depth.front().first ? "" : "               ", depth,
                        std::string(bar, '#'), format_seconds(seconds));
  }
  return text + "\nresult         " + verdict(report) + "\n";
}

std::string tune_html(const TuneReport& report) {
  std::string body = "<p>" + html_escaped(verdict(report)) + "</p>\n<div class=\"plots\">\n" +
                     depth_plot(report) + "</div>\n";
  if (!report.measured.empty()) body += table_html(runs_table(report));
  body += table_html(predictions_table(report));
  return html_page("Overspill: tuning", fmt::format("Tuned over {} Programs", report.simulated),
                   body);
}

std::string tune_json(const TuneReport& report) {
  const auto trials = [](const std::vector<TuneTrial>& list) {
    Json json = Json::array();
    for (const TuneTrial& trial : list) {
      json.push_back({{"settings", trial.settings},
                      {"predicted_seconds", trial.predicted},
                      {"measured_seconds", trial.measured ? Json(*trial.measured) : Json()}});
    }
    return json;
  };
  Json depths = Json::array();
  for (const auto& [depth, seconds] : report.by_depth) {
    depths.push_back({{"prefetch_depth", depth}, {"predicted_seconds", seconds}});
  }
  const Json json = {{"simulated", report.simulated},
                     {"best", trials(report.best)},
                     {"measured", trials(report.measured)},
                     {"winner", trials({report.winner}).at(0)},
                     {"by_prefetch_depth", depths}};
  return json.dump(2) + "\n";
}

std::string tuned_yaml(const std::filesystem::path& config,
                       const std::vector<std::string>& overrides, const TuneReport& report) {
  std::vector<std::string> settings = overrides;
  settings.insert(settings.end(), report.winner.settings.begin(), report.winner.settings.end());
  const std::string comment =
      fmt::format("{} tuned by `overspill tune`: {}", config.filename().string(), verdict(report));
  return config_with_settings(config, settings, comment);
}

}  // namespace overspill
