// Descriptions come from hwloc, uname and /sys.
#include "engine/bench/bench_host.h"

#include <fmt/chrono.h>
#include <sys/utsname.h>

#include <ctime>
#include <fstream>

#include "engine/base/dtype.h"
#include "engine/base/parallel.h"
#include "engine/base/random.h"
#include "offload/cpu_plan.h"
#include "offload/drive_locality.h"

namespace overspill {
namespace {

constexpr uint64_t kFillBlock = 1 << 16;

float random_value(uint64_t i, float size) {
  const auto bits = static_cast<int32_t>(random_bits(1, i) >> 32);
  return static_cast<float>(bits) * 0x1p-31f * size;
}

}  // namespace

BenchHost describe_bench_host(const Machine& machine) {
  BenchHost host;
  utsname name{};
  if (::uname(&name) == 0) host.kernel = fmt::format("{} {}", name.sysname, name.release);
  host.machine = fmt::format("{}, {} cores", machine.cpu_model, machine.cores);
  host.started = fmt::format("{:%Y-%m-%d %H:%M:%S} UTC", fmt::gmtime(std::time(nullptr)));
  return host;
}

void choose_run_groups(const Machine& machine) {
  if (parallel_groups_chosen()) return;
  const CpuPlan plan =
      machine.is_this_system ? plan_cpus(machine, {.allowed = allowed_cpus()}) : CpuPlan{};
  set_parallel_groups(parallel_groups_of(plan));
}

std::vector<std::vector<uint32_t>> read_numa_distances(const Machine& machine,
                                                       const std::filesystem::path& nodes) {
  std::vector<std::vector<uint32_t>> distances;
  if (machine.numa_nodes.size() < 2) return distances;
  for (const NumaNode& node : machine.numa_nodes) {
    std::ifstream file(nodes / fmt::format("node{}", node.index) / "distance");
    std::vector<uint32_t> row;
    for (uint32_t distance = 0; file >> distance;) row.push_back(distance);
    if (row.size() != machine.numa_nodes.size()) return {};
    distances.push_back(std::move(row));
  }
  return distances;
}

void fill_floats(float* values, uint64_t count, float size) {
  parallel_blocks(count, kFillBlock, [=](uint64_t begin, uint64_t end) {
    for (uint64_t i = begin; i < end; ++i) values[i] = random_value(i, size);
  });
}

void fill_bf16(uint16_t* values, uint64_t count, float size) {
  parallel_blocks(count, kFillBlock, [=](uint64_t begin, uint64_t end) {
    for (uint64_t i = begin; i < end; ++i) values[i] = float_to_bf16(random_value(i, size));
  });
}

}  // namespace overspill
