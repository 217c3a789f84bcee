// What `overspill bench nvme` measures and concludes, as data: points, rates, recommendations.
// Pure functions over numbers; measuring is drive_runner's.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/plan/profile.h"

namespace overspill {

enum class Traffic : uint8_t { read, write, mixed };
const char* traffic_name(Traffic traffic);

/// Pages one after the other through the file, or in random order as training asks for them.
enum class PageOrder : uint8_t { sequential, random };
const char* order_name(PageOrder order);

struct BenchPoint {
  Traffic traffic;
  PageOrder order;
  uint64_t block_bytes;
  uint32_t read_depth = 0, write_depth = 0;  ///< requests in flight per drive; 0: not used
  bool operator==(const BenchPoint&) const = default;
};

/// Bytes per second of each side, and what it cost the processors.
struct BenchRates {
  double read = 0, write = 0;
  double cpu_seconds_per_gb = 0;  ///< of all threads, per 10^9 bytes moved
  double lane_cpu_seconds_per_gb =
      0;  ///< of the threads that submit and reap: without kernel workers
};

struct BenchResult {
  BenchPoint point;
  BenchRates rates;
};

struct SweepGrid {
  std::vector<uint64_t> block_sizes;
  std::vector<uint32_t> depths;
  uint64_t most_in_flight = 0;  ///< bytes per drive; larger combinations are left out
  bool sequential = true;       ///< besides random order
};

/// Reads and writes, each alone. Throws Error(invalid_config) when no combination is left.
std::vector<BenchPoint> alone_points(const SweepGrid& grid);
/// Both at once at one block size, every pair of depths.
std::vector<BenchPoint> mixed_points(const SweepGrid& grid, uint64_t block_bytes);

/// The settings to use, and the rates measured with them.
struct Recommendation {
  uint64_t block_bytes = 0;
  uint32_t read_depth = 0, write_depth = 0;              ///< each alone
  double read = 0, write = 0;                            ///< rates alone
  uint32_t mixed_read_depth = 0, mixed_write_depth = 0;  ///< both at once
  double mixed_read = 0, mixed_write = 0;
  bool reads_keep_half = false;  ///< while both run, reads reach half of their rate alone
  DriveSettings settings() const { return {block_bytes, mixed_read_depth, mixed_write_depth}; }
};

/// Block size and depths for reads and writes alone: the smallest within 3 % of the best in random
/// order. Results of other points are ignored.
Recommendation recommend_alone(std::span<const BenchResult> results);
/// Adds the depths for both at once: among pairs at the recommended block size with which reads
/// keep half of their rate alone, the smallest pair within 3 % of the fastest flow that both sides
/// sustain (a step reads about as much as it writes). Without such a pair, the fastest reads.
void recommend_mixed(std::span<const BenchResult> results, Recommendation& recommendation);

/// Rates with the process and its memory on one NUMA node.
struct NodeResult {
  uint32_t node;
  std::optional<bool> local;  ///< to the drive; empty when its node is unknown or spans all
  double read, write;
};

/// One path alone, or all together.
struct TargetResult {
  std::string name;
  std::vector<std::filesystem::path> paths;
  uint64_t bytes = 0;  ///< written before anything was timed
  std::string backend;
  bool direct = true;           ///< O_DIRECT; without it rates are the page cache's
  double first_write_rate = 0;  ///< bytes/s of the first write to new blocks
  std::vector<BenchResult> results;
  std::vector<NodeResult> nodes;
  Recommendation best;
  double checksum_cpu_seconds_per_gb = 0;  ///< of the lanes' threads at `best`; 0: not measured
};

struct NvmeBenchReport {
  std::string machine, kernel, started;
  uint64_t page_bytes = 0;
  double seconds_per_point = 0;
  std::vector<TargetResult> targets;  ///< each path, then all together when there are several
  std::vector<std::string> notes;
};

/// The profile of the last target: what a run over all the paths should use.
DrivesProfile to_profile(const NvmeBenchReport& report);

}  // namespace overspill
