// The machine that a benchmark runs on: how reports name it, and the threads and memory that its
// measurements use, which are those of a run.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "offload/topology.h"

namespace overspill {

struct BenchHost {
  std::string machine;  ///< "AMD EPYC 9005, 2 cores"
  std::string kernel;   ///< "Linux 6.18"
  std::string started;  ///< date and time
};
BenchHost describe_bench_host(const Machine& machine);

/// Groups of compute threads as a run has them, unless they are chosen.
void choose_run_groups(const Machine& machine);

/// Distances between the machine's NUMA nodes, a row each; none with one node, or when a row is
/// missing in `nodes`.
std::vector<std::vector<uint32_t>> read_numa_distances(
    const Machine& machine, const std::filesystem::path& nodes = "/sys/devices/system/node");

/// Random values of at most `size`, by all threads.
void fill_floats(float* values, uint64_t count, float size);
void fill_bf16(uint16_t* values, uint64_t count, float size);

}  // namespace overspill
