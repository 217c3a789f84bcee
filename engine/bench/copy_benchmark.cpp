// What is measured, one device after the other, then all at once.
#include "engine/bench/copy_benchmark.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "engine/base/error.h"
#include "engine/base/parallel.h"
#include "engine/bench/copy_works.h"
#include "engine/bench/triad.h"
#include "offload/arena.h"
#include "offload/numa_binding.h"

namespace overspill {
namespace {

constexpr uint64_t kTypicalBytes = 16 * kMiB;  // a chunk's weights are 2 to 8 MiB, its state more
constexpr uint64_t kTriadPiece = 8 * kMiB;
constexpr uint64_t kSmallBytes = 4 * kKiB;  // of a copy that is all latency
constexpr auto kUp = CopyDirection::to_device, kDown = CopyDirection::to_host;

/// -1 when unknown.
int node_of(const Machine& machine, const CudaGpu& gpu) {
  const auto found = std::ranges::find(machine.gpus, gpu.pci, &Gpu::pci);
  return found == machine.gpus.end() ? -1 : found->numa_node;
}

class CopyBenchmark {
 public:
  CopyBenchmark(const CopyBenchOptions& options, const Machine& machine,
                const std::atomic<bool>& stop, const BenchProgress& progress)
      : options_(options),
        machine_(machine),
        half_(std::max(options.bytes_per_direction, std::ranges::max(options.sizes))),
        typical_(std::min(kTypicalBytes, std::ranges::max(options.sizes))),
        found_(options.devices(2 * half_)),
        arena_half_(std::max(half_, typical_ * found_.devices.size())),
        arena_(2 * arena_half_, "host copies"),
        pageable_(std::make_unique<std::byte[]>(2 * half_)),
        rounds_(options.rounds, count_tasks(), stop, progress) {
    report_.typical_bytes = typical_;
    report_.gpu_absence = found_.gpu_absence;
  }

  CopyReport run() {
    measure_memory();
    for (const CopyDevice& one : found_.devices) measure_device(one);
    if (found_.devices.size() > 1) measure_all();
    for (size_t i = 0; i < found_.devices.size(); ++i) {
      compare_nodes(found_.devices[i], report_.devices[i]);
    }
    return std::move(report_);
  }

 private:
  size_t count_tasks() const {
    const size_t nodes = machine_.numa_nodes.size(), devices = found_.devices.size();
    const size_t of_a_device = options_.sizes.size() * 6 + 2 + (nodes > 1 ? 2 * nodes : 0);
    return 1 + devices * of_a_device + (devices > 1 ? 3 : 0);
  }

  CopyMemory pinned(const CopyDevice& one) const {
    return {one.device.get(), arena_.memory(), arena_.memory() + arena_half_, half_};
  }
  CopyMemory pageable(const CopyDevice& one) const {
    return {one.device.get(), pageable_.get(), pageable_.get() + half_, half_};
  }
  /// GPUs write to host memory of their own.
  CopyMemory part(size_t index) const {
    const uint64_t bytes = std::min(arena_half_ / found_.devices.size(), half_);
    CopyMemory memory = pinned(found_.devices[index]);
    memory.to_device += index * bytes;
    memory.to_host += index * bytes;
    memory.bytes = bytes;
    return memory;
  }
  HostRegistration register_arena(const CopyDevice& one) const {
    return one.device->register_host({arena_.memory(), arena_.bytes()});
  }

  /// Copies of pinned memory as a lane makes them. With the host as the device the lane's thread
  /// copies itself.
  static BenchWork lane_copies(const CopyDevice& one, const CopyMemory& memory, uint64_t bytes,
                               CopyDirection direction) {
    return one.gpu ? queued_copies(memory, bytes, direction)
                   : single_copy(memory, bytes, direction);
  }

  /// The rate of three whole arrays depends on where the system put them, by a factor of two. So
  /// each call of the triad takes three pieces, and every pass combines others.
  void measure_memory() {
    const uint64_t piece = std::min<uint64_t>(kTriadPiece, options_.triad_bytes / 3) / 64 * 64;
    const uint64_t count = options_.triad_bytes / piece / 3 * 3, size = piece / sizeof(float);
    const Arena arena(count * piece, "triad");
    auto* const memory = reinterpret_cast<float*>(arena.memory());
    fill_floats(memory, count * size, 1.0f);
    std::vector<uint64_t> order(count);
    std::iota(order.begin(), order.end(), uint64_t{0});
    const auto pass = [=, turn = uint64_t{0}]() mutable {
      order = shuffled(std::move(order), ++turn);
      const auto at = [&](uint64_t i) { return memory + order[i] * size; };
      for (uint64_t i = 0; i < count; i += 3) triad(at(i), at(i + 1), at(i + 2), size);
    };
    const BenchTask task{.name = "memory, triad on all cores",
                         .unit = "GB/s",
                         .works = {{static_cast<double>(count * piece), pass}}};
    report_.memory_bandwidth = rounds_.measure({&task, 1})[0][0];
  }

  std::vector<BenchTask> copy_tasks(const CopyDevice& one, DeviceCopies& result) const {
    std::vector<BenchTask> tasks;
    for (const uint64_t bytes : options_.sizes) {
      for (const bool is_pinned : {true, false}) {
        const auto copies = [&](CopyDirection direction) {
          return is_pinned ? lane_copies(one, pinned(one), bytes, direction)
                           : single_copy(pageable(one), bytes, direction);
        };
        const std::string what =
            fmt::format("{} {}", format_bytes(bytes), is_pinned ? "pinned" : "pageable");
        tasks.push_back({"host to device, " + what, "GB/s", {copies(kUp)}});
        tasks.push_back({"device to host, " + what, "GB/s", {copies(kDown)}});
        tasks.push_back({"both directions, " + what, "GB/s", {copies(kUp), copies(kDown)}});
        result.points.push_back({.bytes = bytes, .pinned = is_pinned});
      }
    }
    return tasks;
  }

  void measure_device(const CopyDevice& one) {
    DeviceCopies& result = report_.devices.emplace_back();
    result.name = one.device->name();
    if (one.gpu) result.gpu = {one.gpu->index, one.gpu->pci, node_of(machine_, *one.gpu)};
    const HostRegistration registration = register_arena(one);
    std::vector<BenchTask> tasks = copy_tasks(one, result);
    const size_t small = tasks.size();
    for (const CopyDirection direction : {kUp, kDown}) {
      tasks.push_back({"small copies", "GB/s", {single_copy(pinned(one), kSmallBytes, direction)}});
    }
    const auto rates = rounds_.measure(tasks);
    for (size_t i = 0; i < result.points.size(); ++i) {
      CopyPoint& point = result.points[i];
      point.h2d = rates[3 * i][0];
      point.d2h = rates[3 * i + 1][0];
      point.both_h2d = rates[3 * i + 2][0];
      point.both_d2h = rates[3 * i + 2][1];
    }
    result.latency = kSmallBytes * (1 / rates[small][0] + 1 / rates[small + 1][0]) / 2;
  }

  void measure_all() {
    const size_t devices = found_.devices.size();
    std::vector<HostRegistration> registrations;
    for (const CopyDevice& one : found_.devices) registrations.push_back(register_arena(one));
    std::vector<BenchTask> tasks = {{"host to all devices", "GB/s", {}},
                                    {"all devices to host", "GB/s", {}},
                                    {"all devices, both directions", "GB/s", {}}};
    for (const CopyDirection direction : {kUp, kDown}) {
      for (size_t i = 0; i < devices; ++i) {
        const auto copies = [&] {
          return lane_copies(found_.devices[i], part(i), typical_, direction);
        };
        tasks[direction == kUp ? 0 : 1].works.push_back(copies());
        tasks[2].works.push_back(copies());
      }
    }
    const auto rates = rounds_.measure(tasks);
    const auto sum = [&](size_t task, size_t first) {
      const auto begin = rates[task].begin() + static_cast<std::ptrdiff_t>(first);
      return std::accumulate(begin, begin + static_cast<std::ptrdiff_t>(devices), 0.0);
    };
    report_.all_h2d = sum(0, 0);
    report_.all_d2h = sum(1, 0);
    report_.all_both_h2d = sum(2, 0);
    report_.all_both_d2h = sum(2, devices);
  }

  void compare_nodes(const CopyDevice& one, DeviceCopies& result) {
    if (machine_.numa_nodes.size() < 2) return;
    for (const NumaNode& node : machine_.numa_nodes) {
      // Before it is pinned: pinned memory does not move.
      if (!place_on_node(arena_.memory(), arena_.bytes(), node.index)) continue;
      const HostRegistration registration = register_arena(one);
      std::vector<BenchTask> tasks;
      for (const CopyDirection direction : {kUp, kDown}) {
        tasks.push_back(
            {fmt::format("{}, memory of NUMA node {}",
                         direction == kUp ? "host to device" : "device to host", node.index),
             "GB/s",
             {lane_copies(one, pinned(one), typical_, direction)}});
      }
      const auto rates = rounds_.measure(tasks);
      result.nodes.push_back({.node = node.index, .h2d = rates[0][0], .d2h = rates[1][0]});
    }
  }

  const CopyBenchOptions& options_;
  const Machine& machine_;
  const uint64_t half_, typical_;
  CopyDevices found_;
  const uint64_t arena_half_;
  Arena arena_;
  std::unique_ptr<std::byte[]> pageable_;
  BenchRounds rounds_;
  CopyReport report_;
};

}  // namespace

CopyReport run_copy_benchmark(const CopyBenchOptions& options, const std::atomic<bool>& stop,
                              const BenchProgress& progress) {
  CHECK(!options.sizes.empty() && std::ranges::min(options.sizes) >= kSmallBytes);
  const Machine machine = read_machine();
  choose_run_groups(machine);
  CopyReport report = CopyBenchmark(options, machine, stop, progress).run();
  report.memory_bytes = machine.memory_bytes;
  report.cores = std::min(machine.cores, parallel_threads());
  report.numa_distances = read_numa_distances(machine);
  return report;
}

}  // namespace overspill
