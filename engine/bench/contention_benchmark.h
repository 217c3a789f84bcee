// What lanes cost each other: a forward, an update and reads from a drive, each alone and two at
// once on threads of their own, as lanes run them. One call, one thread.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "engine/bench/bench_rounds.h"
#include "engine/bench/bench_section.h"
#include "engine/bench/compute_benchmark.h"
#include "engine/bench/optimizer_benchmark.h"
#include "engine/plan/profile.h"

namespace overspill {

struct ContentionBenchOptions {
  std::vector<std::filesystem::path> paths;  ///< of drives; without any there are no reads
  uint64_t bytes_per_path = kGiB;
  DriveSettings drives{.block_bytes = kMiB, .read_depth = 8, .write_depth = 8};
  ComputeBenchOptions compute{.hidden_sizes = {1024}, .tokens = {256}};
  OptimizerBenchOptions optimizer{};
  RoundOptions rounds{.rounds = 5, .seconds = 0.3};
};

/// Two works at once; rates as parts of each one's alone.
struct ContentionPair {
  std::string first, second;
  double first_part = 0, second_part = 0;
};

struct ContentionReport {
  std::vector<ContentionPair> pairs;
};

/// Throws Error(cancelled) when `stop` was set, and what the drives' benchmark throws.
ContentionReport run_contention_benchmark(const ContentionBenchOptions& options,
                                          const std::atomic<bool>& stop,
                                          const BenchProgress& progress);

BenchSection contention_section(const ContentionReport& report);

}  // namespace overspill
