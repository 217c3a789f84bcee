// The report as one HTML page: a summary, plots per target, and every number in a table.
#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "engine/base/units.h"
#include "engine/bench/html_page.h"
#include "engine/bench/nvme_report.h"
#include "engine/bench/svg_plot.h"

namespace overspill {
namespace {

double gigabytes(double rate) { return rate * 1e-9; }

uint32_t depth_of(const BenchPoint& point) { return std::max(point.read_depth, point.write_depth); }

/// Bandwidth over block size, a line per depth: full in random order, dashed in file order.
std::string alone_plot(const TargetResult& target, Traffic traffic) {
  LinePlot plot;
  plot.title = traffic == Traffic::read ? "Reads" : "Writes";
  plot.x_title = "block size (full: pages in random order, dashed: in file order)";
  plot.y_title = "GB/s";
  std::set<uint64_t> blocks;
  std::set<uint32_t> depths;
  for (const BenchResult& result : target.results) {
    if (result.point.traffic != traffic) continue;
    blocks.insert(result.point.block_bytes);
    depths.insert(depth_of(result.point));
  }
  for (const uint64_t block : blocks) {
    plot.x_ticks.emplace_back(static_cast<double>(block), short_bytes(block));
  }
  for (const PageOrder order : {PageOrder::sequential, PageOrder::random}) {
    for (const uint32_t depth : depths) {
      PlotLine line;
      line.name = fmt::format("depth {}", depth);
      line.colour = static_cast<size_t>(std::distance(depths.begin(), depths.find(depth)));
      line.dashed = order == PageOrder::sequential;
      for (const BenchResult& result : target.results) {
        const BenchPoint& point = result.point;
        if (point.traffic != traffic || point.order != order || depth_of(point) != depth) continue;
        const double rate = traffic == Traffic::read ? result.rates.read : result.rates.write;
        line.points.emplace_back(static_cast<double>(point.block_bytes), gigabytes(rate));
      }
      std::ranges::sort(line.points);
      if (!line.points.empty()) plot.lines.push_back(line);
    }
  }
  return draw(plot);
}

std::string mixed_plot(const TargetResult& target) {
  BarPlot plot;
  plot.title = fmt::format("Both at once, {} blocks", short_bytes(target.best.block_bytes));
  plot.x_title = "read depth / write depth (* recommended)";
  plot.y_title = "GB/s";
  plot.parts = {"read", "write"};
  for (const BenchResult& result : target.results) {
    const BenchPoint& point = result.point;
    if (point.traffic != Traffic::mixed) continue;
    plot.bars.push_back({.label = fmt::format("{}/{}", point.read_depth, point.write_depth),
                         .parts = {gigabytes(result.rates.read), gigabytes(result.rates.write)},
                         .marked = point.read_depth == target.best.mixed_read_depth &&
                                   point.write_depth == target.best.mixed_write_depth});
  }
  return draw(plot);
}

/// Each path and all together, at the recommended settings.
std::string overview_plot(const NvmeBenchReport& report) {
  BarPlot reads{.title = "Reads at the recommended settings",
                .x_title = "",
                .y_title = "GB/s",
                .parts = {"read"},
                .bars = {}};
  BarPlot writes = reads, both = reads;
  writes.title = "Writes at the recommended settings";
  writes.parts = {"write"};
  both.title = "Both at once at the recommended settings";
  both.parts = {"read", "write"};
  for (size_t i = 0; i < report.targets.size(); ++i) {
    const Recommendation& best = report.targets[i].best;
    const bool all = report.targets[i].paths.size() > 1;
    const std::string label = all ? "all" : fmt::format("path {}", i + 1);
    reads.bars.push_back({.label = label, .parts = {gigabytes(best.read)}});
    writes.bars.push_back({.label = label, .parts = {gigabytes(best.write)}});
    both.bars.push_back(
        {.label = label, .parts = {gigabytes(best.mixed_read), gigabytes(best.mixed_write)}});
  }
  return "<div class=\"plots\">\n" + draw(reads) + draw(writes) + draw(both) + "</div>\n";
}

std::string summary_table(const NvmeBenchReport& report) {
  std::string html =
      "<div class=\"scroll\"><table>\n<tr><th>path</th><th>block size</th><th>read depth</th>"
      "<th>write depth</th><th>read</th><th>write</th><th>both: read</th><th>both: write</th>"
      "<th>first write</th></tr>\n";
  for (const TargetResult& target : report.targets) {
    const Recommendation& best = target.best;
    html += fmt::format(
        "<tr><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{:.2f}</td><td>{:.2f}</td>"
        "<td>{:.2f}</td><td>{:.2f}</td><td>{:.2f}</td></tr>\n",
        html_escaped(target.name), short_bytes(best.block_bytes), best.mixed_read_depth,
        best.mixed_write_depth, gigabytes(best.read), gigabytes(best.write),
        gigabytes(best.mixed_read), gigabytes(best.mixed_write),
        gigabytes(target.first_write_rate));
  }
  return html + "</table></div>\n<p>Rates in GB/s (10<sup>9</sup> bytes per second).</p>\n";
}

bool is_best(const BenchPoint& point, const Recommendation& best) {
  if (point.order != PageOrder::random || point.block_bytes != best.block_bytes) return false;
  switch (point.traffic) {
    case Traffic::read: return point.read_depth == best.read_depth;
    case Traffic::write: return point.write_depth == best.write_depth;
    case Traffic::mixed:
      return point.read_depth == best.mixed_read_depth &&
             point.write_depth == best.mixed_write_depth;
  }
  return false;
}

std::string results_table(const TargetResult& target) {
  std::string html =
      "<details><summary>All numbers</summary>\n<div class=\"scroll\"><table>\n<tr><th>traffic</th>"
      "<th>order</th><th>block size</th><th>read depth</th><th>write depth</th><th>read GB/s</th>"
      "<th>write GB/s</th><th>CPU s/GB</th></tr>\n";
  for (const BenchResult& result : target.results) {
    const BenchPoint& point = result.point;
    const auto depth = [](uint32_t value) { return value == 0 ? "" : fmt::format("{}", value); };
    const auto rate = [](double value) {
      return value > 0 ? fmt::format("{:.2f}", gigabytes(value)) : "";
    };
    html += fmt::format(
        "<tr{}><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td>"
        "<td>{:.3f}</td></tr>\n",
        is_best(point, target.best) ? " class=\"best\"" : "", traffic_name(point.traffic),
        order_name(point.order), short_bytes(point.block_bytes), depth(point.read_depth),
        depth(point.write_depth), rate(result.rates.read), rate(result.rates.write),
        result.rates.cpu_seconds_per_gb);
  }
  return html + "</table></div></details>\n";
}

std::string target_section(const TargetResult& target) {
  std::string html = fmt::format(
      "<h2>{}</h2>\n<p>{} by {}{}. Use {}.{}</p>\n", html_escaped(target.name),
      format_bytes(target.bytes), target.backend,
      target.direct ? " with O_DIRECT" : ", <b>without O_DIRECT: the page cache's rates</b>",
      describe_recommendation(target.best),
      target.best.reads_keep_half ? "" : " No depths let reads keep half of their rate alone.");
  html += "<div class=\"plots\">\n" + alone_plot(target, Traffic::read) +
          alone_plot(target, Traffic::write) + mixed_plot(target) + "</div>\n";
  if (!target.nodes.empty()) {
    html += "<table>\n<tr><th>NUMA node</th><th>read GB/s</th><th>write GB/s</th></tr>\n";
    for (const NodeResult& node : target.nodes) {
      html += fmt::format("<tr><td>{}{}</td><td>{:.2f}</td><td>{:.2f}</td></tr>\n", node.node,
                          !node.local   ? ""
                          : *node.local ? " (the drive's)"
                                        : " (remote)",
                          gigabytes(node.read), gigabytes(node.write));
    }
    html += "</table>\n";
  }
  return html + results_table(target);
}

}  // namespace

std::string bench_html_body(const NvmeBenchReport& report) {
  std::string html = fmt::format(
      "<p>{}; {}; {}. Pages of {} in requests of the block size, {} per point.</p>\n",
      html_escaped(report.machine), html_escaped(report.kernel), html_escaped(report.started),
      short_bytes(report.page_bytes), format_seconds(report.seconds_per_point));
  for (const std::string& note : report.notes) html += html_note(note);
  html += summary_table(report);
  if (report.targets.size() > 1) html += overview_plot(report);
  for (const TargetResult& target : report.targets) html += target_section(target);
  return html;
}

std::string bench_html(const NvmeBenchReport& report) {
  return html_page("Overspill: drives", "Drives as training uses them", bench_html_body(report));
}

}  // namespace overspill
