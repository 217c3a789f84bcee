// Every copy takes the next piece of its memory, so that none finds its bytes in a cache.
#include "engine/bench/copy_benchmark.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "engine/base/error.h"
#include "engine/base/parallel.h"
#include "engine/bench/triad.h"
#include "offload/arena.h"
#include "offload/numa_binding.h"

namespace overspill {
namespace {

constexpr uint64_t kTypicalBytes = 16 * kMiB;  // a chunk's weights are 2 to 8 MiB, its state more
constexpr uint64_t kTriadPiece = 8 * kMiB;
constexpr uint64_t kSmallBytes = 4 * kKiB;  // of a copy that is all latency

/// The host's side of the copies of both directions, and one device's.
struct Sides {
  std::byte* host;  ///< up: the first half, down: the second
  Device* device;
  uint64_t half;
};

BenchWork copy_work(const Sides& sides, uint64_t bytes, bool up) {
  return {static_cast<double>(bytes), [=, turn = uint64_t{0}]() mutable {
            const uint64_t at = turn++ % (sides.half / bytes) * bytes + (up ? 0 : sides.half);
            std::byte *host = sides.host + at, *device = sides.device->memory() + at;
            up ? sides.device->copy_to_device(device, host, bytes)
               : sides.device->copy_to_host(host, device, bytes);
          }};
}

class CopyBenchmark {
 public:
  CopyBenchmark(const CopyBenchOptions& options, const Machine& machine,
                const std::atomic<bool>& stop, const BenchProgress& progress)
      : options_(options),
        machine_(machine),
        half_(std::max(options.bytes_per_direction, std::ranges::max(options.sizes))),
        devices_(options.devices(2 * half_)),
        arena_(2 * half_, "host copies"),
        pageable_(std::make_unique<std::byte[]>(2 * half_)),
        rounds_(options.rounds, count_tasks(), stop, progress) {
    report_.typical_bytes = std::min(kTypicalBytes, std::ranges::max(options.sizes));
  }

  CopyReport run() {
    measure_memory();
    for (const auto& device : devices_) measure_device(*device);
    if (devices_.size() > 1) measure_all();
    for (size_t i = 0; i < devices_.size(); ++i) compare_nodes(*devices_[i], report_.devices[i]);
    return std::move(report_);
  }

 private:
  size_t count_tasks() const {
    const size_t nodes = machine_.numa_nodes.size();
    const size_t of_a_device = options_.sizes.size() * 6 + 2 + (nodes > 1 ? 2 * nodes : 0);
    return 1 + devices_.size() * of_a_device + (devices_.size() > 1 ? 2 : 0);
  }

  Sides sides(Device& device, bool pinned) const {
    return {pinned ? arena_.memory() : pageable_.get(), &device, half_};
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

  void measure_device(Device& device) {
    DeviceCopies& result = report_.devices.emplace_back();
    result.name = device.name();
    std::vector<BenchTask> tasks;
    for (const uint64_t bytes : options_.sizes) {
      for (const bool pinned : {true, false}) {
        const Sides memory = sides(device, pinned);
        const std::string what =
            fmt::format("{} {}", format_bytes(bytes), pinned ? "pinned" : "pageable");
        const BenchWork up = copy_work(memory, bytes, true), down = copy_work(memory, bytes, false);
        tasks.push_back({"host to device, " + what, "GB/s", {up}});
        tasks.push_back({"device to host, " + what, "GB/s", {down}});
        tasks.push_back({"both directions, " + what, "GB/s", {up, down}});
        result.points.push_back({.bytes = bytes, .pinned = pinned});
      }
    }
    const size_t small = tasks.size();
    for (const bool up : {true, false}) {
      tasks.push_back({"small copies", "GB/s", {copy_work(sides(device, true), kSmallBytes, up)}});
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
    std::vector<BenchTask> tasks;
    for (const bool up : {true, false}) {
      BenchTask task{
          .name = up ? "host to all devices" : "all devices to host", .unit = "GB/s", .works = {}};
      for (const auto& device : devices_) {
        task.works.push_back(copy_work(sides(*device, true), report_.typical_bytes, up));
      }
      tasks.push_back(std::move(task));
    }
    const auto rates = rounds_.measure(tasks);
    for (const double rate : rates[0]) report_.all_h2d += rate;
    for (const double rate : rates[1]) report_.all_d2h += rate;
  }

  void compare_nodes(Device& device, DeviceCopies& result) {
    if (machine_.numa_nodes.size() < 2) return;
    for (const NumaNode& node : machine_.numa_nodes) {
      if (!place_on_node(arena_.memory(), arena_.bytes(), node.index)) continue;
      std::vector<BenchTask> tasks;
      for (const bool up : {true, false}) {
        tasks.push_back({fmt::format("{}, memory of NUMA node {}",
                                     up ? "host to device" : "device to host", node.index),
                         "GB/s",
                         {copy_work(sides(device, true), report_.typical_bytes, up)}});
      }
      const auto rates = rounds_.measure(tasks);
      result.nodes.push_back({.node = node.index, .h2d = rates[0][0], .d2h = rates[1][0]});
    }
  }

  const CopyBenchOptions& options_;
  const Machine& machine_;
  const uint64_t half_;
  std::vector<std::unique_ptr<Device>> devices_;
  Arena arena_;
  std::unique_ptr<std::byte[]> pageable_;
  BenchRounds rounds_;
  CopyReport report_;
};

}  // namespace

std::vector<std::unique_ptr<Device>> make_bench_devices(uint64_t bytes) {
  std::vector<std::unique_ptr<Device>> devices;
  devices.push_back(make_host_device(bytes, /*unified=*/false));
  return devices;
}

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
