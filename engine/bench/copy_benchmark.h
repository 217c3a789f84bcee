// `overspill bench copy`: copies between host memory and every device, through Device as a run's
// lanes do, and the host memory's bandwidth with all cores. One call, one thread.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "engine/base/units.h"
#include "engine/bench/bench_rounds.h"
#include "engine/bench/bench_section.h"
#include "engine/bench/copy_devices.h"
#include "engine/plan/profile.h"

namespace overspill {

struct CopyBenchOptions {
  std::vector<uint64_t> sizes = {64 * kKiB, 256 * kKiB, kMiB,      4 * kMiB,
                                 16 * kMiB, 64 * kMiB,  256 * kMiB};
  /// Memory that copies of one direction cycle through; at least the largest size, and larger
  /// than the caches, so that what is copied comes from memory.
  uint64_t bytes_per_direction = 256 * kMiB;
  uint64_t triad_bytes = 384 * kMiB;  ///< of its three arrays
  RoundOptions rounds{};
  CopyDeviceMaker devices = make_copy_devices;
};

/// Bytes per second of copies of one size.
struct CopyPoint {
  uint64_t bytes = 0;
  bool pinned = true;  ///< the host's side is an arena as slots are; else ordinary memory
  double h2d = 0, d2h = 0;
  double both_h2d = 0, both_d2h = 0;  ///< both directions at once, on two threads
};

/// With the host's memory on one NUMA node, at the typical size.
struct CopyNode {
  uint32_t node = 0;
  double h2d = 0, d2h = 0;
};

/// Which GPU was measured, as `overspill info` shows it.
struct CopyGpu {
  uint32_t index = 0;
  std::string pci;
  int numa_node = -1;  ///< -1 when unknown
};

struct DeviceCopies {
  std::string name;
  std::optional<CopyGpu> gpu{};  ///< empty: the host
  std::vector<CopyPoint> points;
  std::vector<CopyNode> nodes;  ///< none with one node
  double latency = 0;  ///< seconds of a copy of 4 KiB that is waited for, both directions' mean
};

struct CopyReport {
  std::vector<DeviceCopies> devices;
  std::string gpu_absence;                    ///< why no GPU was measured; empty where one was
  uint64_t typical_bytes = 0;                 ///< the size that the profile's rates are of
  double all_h2d = 0, all_d2h = 0;            ///< sums over all devices at once; 0: there is one
  double all_both_h2d = 0, all_both_d2h = 0;  ///< and in both directions at once
  double memory_bandwidth = 0;                ///< bytes per second read and written by the triad
  uint64_t memory_bytes = 0;
  uint32_t cores = 0;
  std::vector<std::vector<uint32_t>> numa_distances;
};

/// Throws Error(cancelled) when `stop` was set, Error(does_not_fit) without the memory.
CopyReport run_copy_benchmark(const CopyBenchOptions& options, const std::atomic<bool>& stop,
                              const BenchProgress& progress);

BenchSection copy_section(const CopyReport& report);
/// The link's section, and the host's memory, bandwidth, cores and distances.
void fill_profile(const CopyReport& report, HardwareProfile& profile);

}  // namespace overspill
