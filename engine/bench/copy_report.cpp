// Copies as tables, plots, JSON, and the profile's link.
#include <fmt/format.h>

#include <algorithm>

#include "engine/base/error.h"
#include "engine/bench/copy_benchmark.h"
#include "engine/bench/svg_plot.h"

namespace overspill {
namespace {

using Json = nlohmann::ordered_json;

std::string shown_name(const DeviceCopies& device) {
  if (!device.gpu) return device.name;
  if (device.gpu->numa_node < 0) return fmt::format("GPU {} ({})", device.gpu->index, device.name);
  return fmt::format("GPU {} ({}, NUMA node {})", device.gpu->index, device.name,
                     device.gpu->numa_node);
}

BenchTable copies_table(const DeviceCopies& device) {
  BenchTable table{.title = fmt::format("copies of {}, GB/s", shown_name(device)),
                   .columns = {"size", "host memory", "to device", "to host", "both: to device",
                               "both: to host"},
                   .rows = {}};
  for (const CopyPoint& p : device.points) {
    table.rows.push_back({short_bytes(p.bytes), p.pinned ? "pinned" : "pageable", giga(p.h2d),
                          giga(p.d2h), giga(p.both_h2d), giga(p.both_d2h)});
  }
  for (const CopyNode& node : device.nodes) {
    table.rows.push_back(
        {"", fmt::format("NUMA node {}", node.node), giga(node.h2d), giga(node.d2h), "", ""});
  }
  return table;
}

std::string copies_plot(const DeviceCopies& device) {
  LinePlot plot{.title = "Copies of " + shown_name(device),
                .x_title = "size of a copy (full: pinned memory, dashed: pageable)",
                .y_title = "GB/s",
                .x_ticks = {},
                .lines = {}};
  constexpr std::pair<const char*, double CopyPoint::*> kLines[] = {
      {"to device", &CopyPoint::h2d},
      {"to host", &CopyPoint::d2h},
      {"both: to device", &CopyPoint::both_h2d},
      {"both: to host", &CopyPoint::both_d2h}};
  for (const CopyPoint& p : device.points) {
    if (p.pinned) plot.x_ticks.emplace_back(static_cast<double>(p.bytes), short_bytes(p.bytes));
  }
  for (const bool pinned : {false, true}) {
    for (size_t i = 0; i < std::size(kLines); ++i) {
      PlotLine line{.name = kLines[i].first, .colour = i, .dashed = !pinned, .points = {}};
      for (const CopyPoint& p : device.points) {
        if (p.pinned != pinned) continue;
        line.points.emplace_back(static_cast<double>(p.bytes), p.*kLines[i].second * 1e-9);
      }
      plot.lines.push_back(std::move(line));
    }
  }
  return draw(plot);
}

Json device_json(const DeviceCopies& device) {
  Json points = Json::array(), nodes = Json::array();
  for (const CopyPoint& p : device.points) {
    points.push_back({{"bytes", p.bytes},
                      {"pinned", p.pinned},
                      {"h2d_bytes_per_second", p.h2d},
                      {"d2h_bytes_per_second", p.d2h},
                      {"both_h2d_bytes_per_second", p.both_h2d},
                      {"both_d2h_bytes_per_second", p.both_d2h}});
  }
  for (const CopyNode& node : device.nodes) {
    nodes.push_back({{"node", node.node},
                     {"h2d_bytes_per_second", node.h2d},
                     {"d2h_bytes_per_second", node.d2h}});
  }
  Json gpu = nullptr;
  if (device.gpu) {
    gpu = {{"index", device.gpu->index},
           {"pci", device.gpu->pci},
           {"numa_node", device.gpu->numa_node}};
  }
  return {{"name", device.name},
          {"gpu", gpu},
          {"latency_seconds", device.latency},
          {"results", points},
          {"numa_nodes", nodes}};
}

/// Of pinned memory at the typical size, or the nearest that was measured.
const CopyPoint& typical_point(const CopyReport& report, const DeviceCopies& device) {
  const CopyPoint* chosen = nullptr;
  for (const CopyPoint& p : device.points) {
    if (p.pinned && (p.bytes <= report.typical_bytes || chosen == nullptr)) chosen = &p;
  }
  CHECK(chosen != nullptr);
  return *chosen;
}

}  // namespace

BenchSection copy_section(const CopyReport& report) {
  std::vector<BenchTable> tables;
  std::vector<std::string> plots, notes;
  Json devices = Json::array();
  for (const DeviceCopies& device : report.devices) {
    tables.push_back(copies_table(device));
    plots.push_back(copies_plot(device));
    devices.push_back(device_json(device));
  }
  notes.push_back(fmt::format("memory read and written by all cores (triad): {} GB/s",
                              giga(report.memory_bandwidth)));
  if (report.devices.size() > 1) {
    notes.push_back(fmt::format("all {} devices at once: {} GB/s to them, {} GB/s to the host",
                                report.devices.size(), giga(report.all_h2d), giga(report.all_d2h)));
    notes.push_back(
        fmt::format("all {} devices in both directions: {} GB/s to them beside {} GB/s to the host",
                    report.devices.size(), giga(report.all_both_h2d), giga(report.all_both_d2h)));
  }
  if (!report.gpu_absence.empty()) {
    notes.push_back(fmt::format("the device is the host: {}", report.gpu_absence));
  }
  Json json = {{"memory_bytes_per_second", report.memory_bandwidth},
               {"memory_bytes", report.memory_bytes},
               {"cores", report.cores},
               {"numa_distances", report.numa_distances},
               {"typical_bytes", report.typical_bytes},
               {"all_h2d_bytes_per_second", report.all_h2d},
               {"all_d2h_bytes_per_second", report.all_d2h},
               {"all_both_h2d_bytes_per_second", report.all_both_h2d},
               {"all_both_d2h_bytes_per_second", report.all_both_d2h},
               {"gpu_absence", report.gpu_absence},
               {"devices", devices}};
  return make_section("copy", "Copies between host and device", tables, plots, notes,
                      std::move(json));
}

void fill_profile(const CopyReport& report, HardwareProfile& profile) {
  CHECK(!report.devices.empty());
  LinkProfile link{};
  bool first = true;
  for (const DeviceCopies& device : report.devices) {  // all alike: as the slowest
    const CopyPoint& p = typical_point(report, device);
    const auto slower = [&](double& rate, double other) {
      rate = first ? other : std::min(rate, other);
    };
    slower(link.h2d, p.h2d);
    slower(link.d2h, p.d2h);
    slower(link.both_h2d, p.both_h2d);
    slower(link.both_d2h, p.both_d2h);
    link.latency = first ? device.latency : std::max(link.latency, device.latency);
    first = false;
  }
  link.all_h2d = report.all_h2d;
  link.all_d2h = report.all_d2h;
  profile.link = link;
  profile.device.count = static_cast<uint32_t>(report.devices.size());
  profile.host.memory_bandwidth = report.memory_bandwidth;
  profile.host.memory = report.memory_bytes;
  profile.host.cores = report.cores;
  profile.host.numa_distances = report.numa_distances;
}

}  // namespace overspill
