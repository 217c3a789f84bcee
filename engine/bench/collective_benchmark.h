// `overspill bench collective`: how fast ranks exchange weights and gradients, by size. All ranks
// call it at once; the first one's clock counts.
#pragma once

#include <string>
#include <vector>

#include "engine/bench/bench_rounds.h"
#include "engine/bench/bench_section.h"
#include "engine/collective/ranks.h"
#include "engine/plan/profile.h"

namespace overspill {

struct CollectiveBenchOptions {
  /// Bytes of a rank's part, ascending; multiples of 4.
  std::vector<uint64_t> parts = {4096,
                                 uint64_t{64} << 10,
                                 uint64_t{1} << 20,
                                 uint64_t{4} << 20,
                                 uint64_t{16} << 20,
                                 uint64_t{64} << 20};
  uint32_t rounds = 5;
  double seconds = 0.1;  ///< of a point in a round
};

enum class Exchange : uint8_t { all_gather, reduce_scatter, reduce_scatter_bf16, all_reduce };
inline constexpr size_t kExchanges = 4;
const char* exchange_name(Exchange exchange);

/// One exchange of one size; float32 unless it says bf16.
struct CollectivePoint {
  Exchange exchange;
  uint64_t part = 0;   ///< bytes of a rank's part, as float32
  uint64_t sent = 0;   ///< bytes that a rank sends
  double seconds = 0;  ///< median over the rounds
  double bytes_per_second() const { return static_cast<double>(sent) / seconds; }
};

struct CollectiveReport {
  uint32_t ranks = 1;
  std::vector<CollectivePoint> points;

  const CollectivePoint& largest(Exchange exchange) const;
  const CollectivePoint& smallest(Exchange exchange) const;
};

/// Throws Error(cancelled) on all ranks when `stop` was set on one, Error(rank_lost).
CollectiveReport run_collective_benchmark(const CollectiveBenchOptions& options, const Ranks& ranks,
                                          const std::atomic<bool>& stop,
                                          const BenchProgress& progress);

BenchSection collective_section(const CollectiveReport& report);
/// collective.all_gather, reduce_scatter and latency.
void fill_profile(const CollectiveReport& report, HardwareProfile& profile);

}  // namespace overspill
