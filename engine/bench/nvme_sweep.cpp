// The sweep's points and what follows from their rates.
#include "engine/bench/nvme_sweep.h"

#include <algorithm>
#include <map>
#include <tuple>

#include "engine/base/error.h"
#include "engine/base/units.h"

namespace overspill {
namespace {

constexpr double kNearBest = 0.97;

bool allowed(const SweepGrid& grid, uint64_t block, uint32_t depth) {
  return block * depth <= grid.most_in_flight;
}

bool alone_in_random_order(const BenchPoint& point, Traffic traffic) {
  return point.traffic == traffic && point.order == PageOrder::random;
}

double rate_of(const BenchResult& result) {
  return result.point.traffic == Traffic::read ? result.rates.read : result.rates.write;
}

/// The best rate of each block size over all depths.
std::map<uint64_t, double> best_by_block(std::span<const BenchResult> results, Traffic traffic) {
  std::map<uint64_t, double> best;
  for (const BenchResult& result : results) {
    if (!alone_in_random_order(result.point, traffic)) continue;
    double& rate = best[result.point.block_bytes];
    rate = std::max(rate, rate_of(result));
  }
  return best;
}

double largest(const std::map<uint64_t, double>& rates) {
  double most = 0;
  for (const auto& [block, rate] : rates) most = std::max(most, rate);
  return most;
}

/// The smallest block size with which the slower of the two sides is within 3 % of what any block
/// size gives it.
uint64_t choose_block(std::span<const BenchResult> results) {
  const auto reads = best_by_block(results, Traffic::read);
  const auto writes = best_by_block(results, Traffic::write);
  const double most_read = largest(reads), most_write = largest(writes);
  std::map<uint64_t, double> scores;
  for (const auto& [block, rate] : reads) {
    const auto write = writes.find(block);
    if (write == writes.end() || most_read <= 0 || most_write <= 0) continue;
    scores[block] = std::min(rate / most_read, write->second / most_write);
  }
  CHECK(!scores.empty());
  const double enough = kNearBest * largest(scores);
  for (const auto& [block, score] : scores) {
    if (score >= enough) return block;
  }
  return scores.rbegin()->first;
}

/// The smallest depth within 3 % of the best at one block size.
const BenchResult& choose_depth(std::span<const BenchResult> results, Traffic traffic,
                                uint64_t block) {
  const double best = best_by_block(results, traffic).at(block);
  const BenchResult* chosen = nullptr;
  const auto depth = [&](const BenchResult& result) {
    return traffic == Traffic::read ? result.point.read_depth : result.point.write_depth;
  };
  for (const BenchResult& result : results) {
    if (!alone_in_random_order(result.point, traffic)) continue;
    if (result.point.block_bytes != block || rate_of(result) < kNearBest * best) continue;
    if (chosen == nullptr || depth(result) < depth(*chosen)) chosen = &result;
  }
  CHECK(chosen != nullptr);
  return *chosen;
}

}  // namespace

const char* traffic_name(Traffic traffic) {
  return traffic == Traffic::read ? "read" : traffic == Traffic::write ? "write" : "mixed";
}

const char* order_name(PageOrder order) {
  return order == PageOrder::sequential ? "sequential" : "random";
}

std::vector<BenchPoint> alone_points(const SweepGrid& grid) {
  std::vector<BenchPoint> points;
  for (const uint64_t block : grid.block_sizes) {
    for (const uint32_t depth : grid.depths) {
      if (!allowed(grid, block, depth)) continue;
      for (const PageOrder order : {PageOrder::random, PageOrder::sequential}) {
        if (order == PageOrder::sequential && !grid.sequential) continue;
        points.push_back({Traffic::read, order, block, depth, 0});
        points.push_back({Traffic::write, order, block, 0, depth});
      }
    }
  }
  if (points.empty()) {
    fail(
        ErrorCode::invalid_config,
        "no block size and queue depth are left to measure: at most {} may be in flight per drive; "
        "choose smaller ones (--block-size, --queue-depth) or a larger --size",
        format_bytes(grid.most_in_flight));
  }
  return points;
}

std::vector<BenchPoint> mixed_points(const SweepGrid& grid, uint64_t block_bytes) {
  std::vector<BenchPoint> points;
  for (const uint32_t read : grid.depths) {
    for (const uint32_t write : grid.depths) {
      if (!allowed(grid, block_bytes, read) || !allowed(grid, block_bytes, write)) continue;
      points.push_back({Traffic::mixed, PageOrder::random, block_bytes, read, write});
    }
  }
  return points;
}

Recommendation recommend_alone(std::span<const BenchResult> results) {
  Recommendation chosen;
  chosen.block_bytes = choose_block(results);
  const BenchResult& read = choose_depth(results, Traffic::read, chosen.block_bytes);
  const BenchResult& write = choose_depth(results, Traffic::write, chosen.block_bytes);
  chosen.read_depth = read.point.read_depth;
  chosen.read = read.rates.read;
  chosen.write_depth = write.point.write_depth;
  chosen.write = write.rates.write;
  return chosen;
}

void recommend_mixed(std::span<const BenchResult> results, Recommendation& chosen) {
  std::vector<const BenchResult*> fair, all;
  for (const BenchResult& result : results) {
    if (result.point.traffic != Traffic::mixed) continue;
    if (result.point.block_bytes != chosen.block_bytes) continue;
    all.push_back(&result);
    // Half is also what a drive that shares its time evenly gives, so noise must not exclude it.
    if (result.rates.read >= 0.5 * kNearBest * chosen.read) fair.push_back(&result);
  }
  CHECK(!all.empty());
  chosen.reads_keep_half = !fair.empty();
  const auto score = [&](const BenchResult* result) {
    return fair.empty() ? result->rates.read : std::min(result->rates.read, result->rates.write);
  };
  const auto size = [](const BenchResult* result) {
    const BenchPoint& point = result->point;
    return std::tuple(point.read_depth + point.write_depth, point.write_depth);
  };
  const std::vector<const BenchResult*>& candidates = fair.empty() ? all : fair;
  double best = 0;
  for (const BenchResult* result : candidates) best = std::max(best, score(result));
  const BenchResult* winner = nullptr;
  for (const BenchResult* result : candidates) {
    if (score(result) < kNearBest * best) continue;
    if (winner == nullptr || size(result) < size(winner)) winner = result;
  }
  CHECK(winner != nullptr);
  chosen.mixed_read_depth = winner->point.read_depth;
  chosen.mixed_write_depth = winner->point.write_depth;
  chosen.mixed_read = winner->rates.read;
  chosen.mixed_write = winner->rates.write;
}

DrivesProfile to_profile(const NvmeBenchReport& report) {
  CHECK(!report.targets.empty());
  const TargetResult& target = report.targets.back();
  const Recommendation& best = target.best;
  DrivesProfile drives;
  drives.count = static_cast<uint32_t>(target.paths.size());
  drives.settings = best.settings();
  drives.latency = 0;  // a page's is part of its rate
  drives.cpu_seconds_per_gb = target.checksum_cpu_seconds_per_gb;
  if (best.read > 0) drives.read = best.read;
  if (best.write > 0) drives.write = best.write;
  if (best.mixed_read > 0) drives.mixed_read = best.mixed_read;
  if (best.mixed_write > 0) drives.mixed_write = best.mixed_write;
  return drives;
}

}  // namespace overspill
