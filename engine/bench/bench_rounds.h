// Measures work by repeating it: several rounds, each in a random order of its own, because a
// machine drifts while it is measured, and the median over the rounds. One calling thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "engine/base/random.h"

namespace overspill {

/// One line per measured point: how many are done of how many, and what this one gave.
using BenchProgress = std::function<void(size_t done, size_t total, const std::string& text)>;

/// Something to repeat, and how much it does each time: bytes, FLOPs, parameters.
struct BenchWork {
  double amount;
  std::function<void()> run;
};

/// Works that run at the same time, each on a thread of its own; an only one in the caller.
struct BenchTask {
  std::string name;
  std::string unit;  ///< of 10^9 amounts per second: "GB/s"
  std::vector<BenchWork> works;
  std::function<void()> prepare{};  ///< before every round, not timed
};

/// Amounts per second of works that run side by side for so long, each at least once. A work that
/// has been measured goes on until all have. Throws what a work throws.
std::vector<double> rates_together(std::span<const BenchWork> works, double seconds);

struct RoundOptions {
  uint32_t rounds = 3;
  double seconds = 0.1;  ///< of a task in a round
};

class BenchRounds {
 public:
  /// `total`: tasks that all calls of measure() will have together, for the progress.
  BenchRounds(const RoundOptions& options, size_t total, const std::atomic<bool>& stop,
              const BenchProgress& progress)
      : options_(options), total_(total * options.rounds), stop_(stop), progress_(progress) {}

  /// Per task and work the median of its amounts per second. Throws Error(cancelled) when stopped.
  std::vector<std::vector<double>> measure(std::span<const BenchTask> tasks);

 private:
  RoundOptions options_;
  size_t done_ = 0, total_;
  const std::atomic<bool>& stop_;
  const BenchProgress& progress_;
};

/// Of an odd number of values the middle one, else the upper of the two; not empty.
double median(std::vector<double> values);

template <class T>
std::vector<T> shuffled(std::vector<T> items, uint64_t seed) {
  for (size_t i = items.size(); i > 1; --i) {
    std::swap(items[i - 1], items[random_below(seed, i, i)]);
  }
  return items;
}

}  // namespace overspill
