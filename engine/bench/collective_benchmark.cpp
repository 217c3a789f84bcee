// The ranks repeat an exchange as often as the first one says.
#include "engine/bench/collective_benchmark.h"

#include <algorithm>
#include <chrono>

#include "engine/base/error.h"
#include "engine/base/units.h"

namespace overspill {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// Buffers for the largest part, and the exchanges on them.
class Exchanges {
 public:
  Exchanges(const Ranks& ranks, uint64_t largest_part)
      : data_(*ranks.groups().shard), values_(largest_part / sizeof(float) * ranks.size(), 1.0f) {}

  void run(Exchange exchange, uint64_t part) {
    const std::span<float> values(values_.data(), part / sizeof(float) * data_.size());
    const std::span<std::byte> bytes = std::as_writable_bytes(values);
    switch (exchange) {
      case Exchange::all_gather:
        return data_.all_gather(bytes.subspan(data_.rank() * part, part), bytes);
      case Exchange::reduce_scatter: return data_.reduce_scatter(values, ReduceType::float32);
      case Exchange::reduce_scatter_bf16: return data_.reduce_scatter(values, ReduceType::bf16);
      case Exchange::all_reduce: return data_.all_reduce(values, ReduceType::float32);
    }
  }
  /// Sums of sums would grow without end.
  void reset() { std::ranges::fill(values_, 1.0f); }
  uint64_t bytes_sent() const { return data_.bytes_sent(); }

 private:
  Collective& data_;
  std::vector<float> values_;
};

double timed(Exchanges& exchanges, Exchange exchange, uint64_t part, uint64_t times,
             const Ranks& ranks) {
  exchanges.reset();
  ranks.world().barrier();
  const auto start = Clock::now();
  for (uint64_t i = 0; i < times; ++i) exchanges.run(exchange, part);
  ranks.world().barrier();
  return seconds_since(start) / static_cast<double>(times);
}

}  // namespace

const char* exchange_name(Exchange exchange) {
  switch (exchange) {
    case Exchange::all_gather: return "all_gather";
    case Exchange::reduce_scatter: return "reduce_scatter";
    case Exchange::reduce_scatter_bf16: return "reduce_scatter, bf16";
    case Exchange::all_reduce: return "all_reduce";
  }
  return "";
}

const CollectivePoint& CollectiveReport::largest(Exchange exchange) const {
  const auto found =
      std::ranges::find(points.rbegin(), points.rend(), exchange, &CollectivePoint::exchange);
  CHECK(found != points.rend());
  return *found;
}

const CollectivePoint& CollectiveReport::smallest(Exchange exchange) const {
  const auto found = std::ranges::find(points, exchange, &CollectivePoint::exchange);
  CHECK(found != points.end());
  return *found;
}

CollectiveReport run_collective_benchmark(const CollectiveBenchOptions& options, const Ranks& ranks,
                                          const std::atomic<bool>& stop,
                                          const BenchProgress& progress) {
  CHECK(ranks.size() > 1 && ranks.groups().shard->size() == ranks.size());
  // Every rank holds all parts: on a host of many, large ones are left out.
  constexpr uint64_t kMostBytes = uint64_t{1} << 30;
  std::vector<uint64_t> parts;
  for (const uint64_t part : options.parts) {
    if (parts.empty() || part * ranks.size() <= kMostBytes) parts.push_back(part);
  }
  Exchanges exchanges(ranks, parts.back());
  CollectiveReport report;
  report.ranks = ranks.size();
  const size_t total = kExchanges * parts.size();
  for (size_t kind = 0; kind < kExchanges; ++kind) {
    for (const uint64_t part : parts) {
      const auto exchange = static_cast<Exchange>(kind);
      const uint64_t sent_before = exchanges.bytes_sent();
      const double once = timed(exchanges, exchange, part, 1, ranks);
      const uint64_t sent = exchanges.bytes_sent() - sent_before;
      // The first rank's clock decides for all.
      const double first_once = ranks.gather(once)[0];
      const auto times = static_cast<uint64_t>(std::max(1.0, options.seconds / first_once));
      std::vector<double> seconds;
      for (uint32_t round = 0; round < options.rounds; ++round) {
        seconds.push_back(timed(exchanges, exchange, part, times, ranks));
      }
      const std::vector<char> stops = ranks.gather(static_cast<char>(stop.load()));
      if (std::ranges::count(stops, 1) > 0) fail(ErrorCode::cancelled, "stopped; nothing is kept");
      report.points.push_back({exchange, part, sent, median(seconds)});
      progress(report.points.size(), total,
               fmt::format("{} of {}: {}", exchange_name(exchange), format_bytes(part),
                           format_rate(report.points.back().bytes_per_second())));
    }
  }
  return report;
}

void fill_profile(const CollectiveReport& report, HardwareProfile& profile) {
  profile.collective = {
      .all_gather = report.largest(Exchange::all_gather).bytes_per_second(),
      .reduce_scatter = report.largest(Exchange::reduce_scatter).bytes_per_second(),
      .latency = report.smallest(Exchange::all_gather).seconds};
}

}  // namespace overspill
