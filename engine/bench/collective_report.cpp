// Exchanges as a table, a plot, and JSON.
#include <fmt/format.h>

#include "engine/base/units.h"
#include "engine/bench/collective_benchmark.h"
#include "engine/bench/svg_plot.h"

namespace overspill {
namespace {

using Json = nlohmann::ordered_json;

std::string rates_plot(const CollectiveReport& report) {
  LinePlot plot{.title = fmt::format("Exchanges of {} ranks", report.ranks),
                .x_title = "bytes of a rank's part",
                .y_title = "GB/s sent by a rank",
                .x_ticks = {},
                .lines = {}};
  for (size_t kind = 0; kind < kExchanges; ++kind) {
    const auto exchange = static_cast<Exchange>(kind);
    PlotLine line{.name = exchange_name(exchange), .colour = kind, .points = {}};
    for (const CollectivePoint& point : report.points) {
      if (point.exchange != exchange) continue;
      const auto x = static_cast<double>(point.part);
      line.points.emplace_back(x, point.bytes_per_second() * 1e-9);
      if (kind == 0) plot.x_ticks.emplace_back(x, format_bytes(point.part));
    }
    plot.lines.push_back(std::move(line));
  }
  return draw(plot);
}

}  // namespace

BenchSection collective_section(const CollectiveReport& report) {
  BenchTable table{.title = fmt::format("exchanges of {} ranks, each with a part", report.ranks),
                   .columns = {"exchange", "part", "a rank sends", "time", "GB/s"},
                   .rows = {}};
  Json points = Json::array();
  for (const CollectivePoint& point : report.points) {
    table.rows.push_back({exchange_name(point.exchange), format_bytes(point.part),
                          format_bytes(point.sent), format_seconds(point.seconds),
                          giga(point.bytes_per_second())});
    points.push_back({{"exchange", exchange_name(point.exchange)},
                      {"part_bytes", point.part},
                      {"sent_bytes", point.sent},
                      {"seconds", point.seconds}});
  }
  const std::string plots[] = {rates_plot(report)};
  const std::string notes[] = {std::string(
      "a rank's memory is read, sent, received and, in a reduction, added: over loopback all of it "
      "shares this host's memory bandwidth and cores")};
  return make_section("collective", "Collectives", {&table, 1}, plots, notes,
                      {{"measured", true}, {"ranks", report.ranks}, {"points", points}});
}

}  // namespace overspill
