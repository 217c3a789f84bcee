// Updates as tables, a plot over threads, JSON, and the profile's rates.
#include <fmt/format.h>

#include <algorithm>

#include "engine/bench/optimizer_benchmark.h"
#include "engine/bench/svg_plot.h"
#include "engine/plan/profile_names.h"

namespace overspill {
namespace {

using Json = nlohmann::ordered_json;

template <class Names, class Enum>
const char* name_in(const Names& names, Enum value) {
  for (const auto& one : names) {
    if (one.value == value) return one.name;
  }
  return "";
}

std::string scaling_plot(const OptimizerReport& report) {
  const UpdateRate& rule = report.updates.front();
  LinePlot plot{.title = "Threads: " + rule_name(rule.optimizer, rule.state),
                .x_title = "threads (dashed: in proportion to one)",
                .y_title = "10^9 parameters/s",
                .x_ticks = {},
                .lines = {}};
  PlotLine measured{.name = "measured", .points = {}},
      ideal{.name = "", .dashed = true, .points = {}};
  const double one = report.scaling.front().parameters_per_second / report.scaling.front().threads;
  for (const ThreadRate& rate : report.scaling) {
    plot.x_ticks.emplace_back(rate.threads, fmt::format("{}", rate.threads));
    measured.points.emplace_back(rate.threads, rate.parameters_per_second * 1e-9);
    ideal.points.emplace_back(rate.threads, rate.threads * one * 1e-9);
  }
  plot.lines = {std::move(ideal), std::move(measured)};
  return draw(plot);
}

std::string rules_plot(const OptimizerReport& report) {
  BarPlot plot{.title = "Updates with all threads",
               .x_title = "rule, bits of its state",
               .y_title = "10^9 parameters/s",
               .parts = {"rate"},
               .bars = {}};
  for (const UpdateRate& rate : report.updates) {
    const bool only =
        1 == std::ranges::count(report.updates, rate.optimizer, &UpdateRate::optimizer);
    const char* bits = only                                  ? ""
                       : rate.state == StateFormat::float32  ? " 32"
                       : rate.state == StateFormat::bfloat16 ? " 16"
                                                             : " 8";
    plot.bars.push_back({.label = fmt::format("{}{}", name_in(kOptimizers, rate.optimizer), bits),
                         .parts = {rate.parameters_per_second * 1e-9}});
  }
  return draw(plot);
}

}  // namespace

std::string rule_name(OptimizerKind kind, StateFormat state) {
  return fmt::format("{}, {} state", name_in(kOptimizers, kind), name_in(kStateFormats, state));
}

BenchSection optimizer_section(const OptimizerReport& report) {
  BenchTable updates{.title = fmt::format("updates of chunks of {} parameters, {} threads",
                                          format_count(report.chunk_parameters), report.threads),
                     .columns = {"rule", "G parameters/s", "ms per 10^8"},
                     .rows = {}};
  Json rates = Json::array(), scaling = Json::array();
  for (const UpdateRate& rate : report.updates) {
    updates.rows.push_back({rule_name(rate.optimizer, rate.state), giga(rate.parameters_per_second),
                            fmt::format("{:.1f}", 1e11 / rate.parameters_per_second)});
    rates.push_back({{"optimizer", name_in(kOptimizers, rate.optimizer)},
                     {"state", name_in(kStateFormats, rate.state)},
                     {"parameters_per_second", rate.parameters_per_second}});
  }
  BenchTable threads{.title = "the first rule on fewer threads",
                     .columns = {"threads", "G parameters/s", "of all"},
                     .rows = {}};
  for (const ThreadRate& rate : report.scaling) {
    threads.rows.push_back(
        {fmt::format("{}", rate.threads), giga(rate.parameters_per_second),
         fmt::format("{:.2f}",
                     rate.parameters_per_second / report.scaling.back().parameters_per_second)});
    scaling.push_back(
        {{"threads", rate.threads}, {"parameters_per_second", rate.parameters_per_second}});
  }
  const std::string note = fmt::format(
      "gradients: sums of squares {} and rounding to bf16 {} G elements/s; a chunk of "
      "4096 parameters takes {}",
      giga(report.reduce_gradient), giga(report.export_gradient),
      format_seconds(report.update_latency));
  const BenchTable tables[] = {std::move(updates), std::move(threads)};
  const std::string plots[] = {rules_plot(report), scaling_plot(report)};
  return make_section("optimizer", "Optimizer updates", tables, plots, {&note, 1},
                      {{"chunk_parameters", report.chunk_parameters},
                       {"threads", report.threads},
                       {"updates", rates},
                       {"update_latency_seconds", report.update_latency},
                       {"reduce_gradient_elements_per_second", report.reduce_gradient},
                       {"export_gradient_elements_per_second", report.export_gradient},
                       {"scaling", scaling}});
}

void fill_profile(const OptimizerReport& report, HardwareProfile& profile) {
  profile.host.updates = report.updates;
  profile.host.update_latency = report.update_latency;
  profile.device.reduce_gradient = report.reduce_gradient;
  profile.device.export_gradient = report.export_gradient;
}

}  // namespace overspill
