// Which benchmark measured what is kept in the profile's sources.
#include "engine/bench/bench_profile.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "engine/base/units.h"
#include "engine/bench/bench_section.h"
#include "engine/bench/optimizer_benchmark.h"
#include "engine/plan/profile_file.h"
#include "offload/drive_locality.h"

namespace overspill {
namespace {

/// The drive's model, or its name where the system tells none; empty when there is no single drive.
std::string drive_model(const Machine& machine, const std::filesystem::path& path) {
  const std::string name = drive_of(path);
  const auto drive = std::ranges::find(machine.drives, name, &Drive::name);
  return drive == machine.drives.end() || drive->model.empty() ? name : drive->model;
}

std::string machine_name(const BenchHost& host, const Machine& machine,
                         std::span<const std::filesystem::path> paths) {
  std::set<std::string> models;
  for (const auto& path : paths) {
    if (const std::string model = drive_model(machine, path); !model.empty()) models.insert(model);
  }
  std::string name = host.machine;
  for (const std::string& model : models) name += ", " + model;
  return name;
}

}  // namespace

HardwareProfile load_or_new_profile(const std::filesystem::path& path) {
  if (path.empty() || !std::filesystem::exists(path)) return {};
  return load_profile(path);
}

void sign_profile(const std::string& benchmark, const BenchHost& host, const Machine& machine,
                  std::span<const std::filesystem::path> paths, HardwareProfile& profile) {
  if (profile.name.empty() || !paths.empty()) profile.name = machine_name(host, machine, paths);
  const std::string head = benchmark + ": ";
  std::erase_if(profile.sources, [&](const std::string& line) { return line.starts_with(head); });
  profile.sources.push_back(
      fmt::format("{}`overspill bench {}` at {}", head, benchmark, host.started));
}

BenchTable profile_summary(const HardwareProfile& profile) {
  BenchTable table{.title = "the profile", .columns = {"", "rate", "unit"}, .rows = {}};
  const auto add = [&](const std::string& name, double rate, const char* unit) {
    table.rows.push_back({name, giga(rate), unit});
  };
  if (profile.drives.settings) {
    add("drives: read", profile.drives.read, "GB/s");
    add("drives: write", profile.drives.write, "GB/s");
    add("drives: read while they write", profile.drives.mixed_read, "GB/s");
    add("drives: write while they read", profile.drives.mixed_write, "GB/s");
  }
  add("host memory", profile.host.memory_bandwidth, "GB/s");
  add("host to device", profile.link.h2d, "GB/s");
  add("device to host", profile.link.d2h, "GB/s");
  for (const UpdateRate& rate : profile.host.updates) {
    add("update: " + rule_name(rate.optimizer, rate.state), rate.parameters_per_second,
        "G parameters/s");
  }
  add("compute, at most", profile.device.peak_flops, "GFLOP/s");
  return table;
}

}  // namespace overspill
