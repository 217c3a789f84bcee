// The sweep's points and its recommendation, on numbers made by hand.
#include "engine/bench/nvme_sweep.h"

#include <gtest/gtest.h>

#include "engine/base/error.h"
#include "engine/base/units.h"

namespace overspill {
namespace {

BenchResult reads(uint64_t block, uint32_t depth, double rate,
                  PageOrder order = PageOrder::random) {
  return {{Traffic::read, order, block, depth, 0}, {.read = rate}};
}
BenchResult writes(uint64_t block, uint32_t depth, double rate,
                   PageOrder order = PageOrder::random) {
  return {{Traffic::write, order, block, 0, depth}, {.write = rate}};
}
BenchResult both(uint64_t block, uint32_t read, uint32_t write, double read_rate,
                 double write_rate) {
  return {{Traffic::mixed, PageOrder::random, block, read, write},
          {.read = read_rate, .write = write_rate}};
}

TEST(NvmeSweep, TakesTheSmallestDepthNearTheBest) {
  const std::vector<BenchResult> results = {reads(kMiB, 1, 0.90),  reads(kMiB, 4, 0.98),
                                            reads(kMiB, 16, 1.00), writes(kMiB, 1, 1.0),
                                            writes(kMiB, 4, 1.9),  writes(kMiB, 16, 3.0)};
  const Recommendation best = recommend_alone(results);
  EXPECT_EQ(best.block_bytes, kMiB);
  EXPECT_EQ(best.read_depth, 4u);
  EXPECT_DOUBLE_EQ(best.read, 0.98);
  EXPECT_EQ(best.write_depth, 16u);
  EXPECT_DOUBLE_EQ(best.write, 3.0);
}

TEST(NvmeSweep, TakesABlockSizeThatSuitsBothSides) {
  // Reads are content with 1 MiB; writes need 4 MiB, and 16 MiB adds less than 3 %.
  const std::vector<BenchResult> results = {reads(kMiB, 4, 1.75),      writes(kMiB, 4, 2.0),
                                            reads(4 * kMiB, 4, 1.74),  writes(4 * kMiB, 4, 2.95),
                                            reads(16 * kMiB, 4, 1.75), writes(16 * kMiB, 4, 3.0)};
  EXPECT_EQ(recommend_alone(results).block_bytes, 4 * kMiB);
}

TEST(NvmeSweep, IgnoresPagesInFileOrder) {
  const std::vector<BenchResult> results = {reads(kMiB, 1, 1.0), writes(kMiB, 1, 1.0),
                                            reads(kMiB, 16, 9.0, PageOrder::sequential),
                                            writes(kMiB, 16, 9.0, PageOrder::sequential)};
  const Recommendation best = recommend_alone(results);
  EXPECT_EQ(best.read_depth, 1u);
  EXPECT_EQ(best.write_depth, 1u);
}

TEST(NvmeSweep, ReadsKeepHalfWhileBothRun) {
  Recommendation best{.block_bytes = kMiB, .read = 1.8, .write = 3.0};
  // More in all with deep writes, but reads starve.
  const std::vector<BenchResult> results = {
      both(kMiB, 4, 64, 0.2, 2.7), both(kMiB, 1, 4, 0.85, 1.5), both(kMiB, 4, 4, 1.1, 1.12),
      both(kMiB, 16, 16, 1.11, 1.11), both(4 * kMiB, 1, 1, 1.8, 3.0)};
  recommend_mixed(results, best);
  EXPECT_TRUE(best.reads_keep_half);
  EXPECT_EQ(best.mixed_read_depth, 4u);
  EXPECT_EQ(best.mixed_write_depth, 4u);
  EXPECT_DOUBLE_EQ(best.mixed_read, 1.1);
  EXPECT_EQ(best.settings(), (DriveSettings{kMiB, 4, 4}));
}

TEST(NvmeSweep, FastestReadsWhereNoDepthsKeepHalf) {
  Recommendation best{.block_bytes = kMiB, .read = 1.8, .write = 3.0};
  recommend_mixed(std::vector{both(kMiB, 1, 1, 0.3, 2.0), both(kMiB, 16, 1, 0.6, 1.0)}, best);
  EXPECT_FALSE(best.reads_keep_half);
  EXPECT_EQ(best.mixed_read_depth, 16u);
}

TEST(NvmeSweep, LeavesOutMoreThanMayBeInFlight) {
  const SweepGrid grid{.block_sizes = {kMiB, 16 * kMiB},
                       .depths = {1, 4, 64},
                       .most_in_flight = 64 * kMiB,
                       .sequential = false};
  // 1 MiB x 1, 4, 64 and 16 MiB x 1, 4; reads and writes of each.
  EXPECT_EQ(alone_points(grid).size(), 10u);
  EXPECT_EQ(mixed_points(grid, kMiB).size(), 9u);
  EXPECT_EQ(mixed_points(grid, 16 * kMiB).size(), 4u);
}

TEST(NvmeSweep, RefusesAGridWithoutPoints) {
  const SweepGrid grid{.block_sizes = {kMiB}, .depths = {64}, .most_in_flight = kMiB};
  EXPECT_THROW(alone_points(grid), Error);
}

TEST(NvmeSweep, ProfileHoldsTheRatesOfAllPathsTogether) {
  NvmeBenchReport report;
  report.targets.resize(2);
  report.targets[0].best = {.block_bytes = kMiB, .mixed_read = 1, .mixed_write = 1};
  report.targets[1].paths = {"a", "b"};
  report.targets[1].best = {.block_bytes = 4 * kMiB,
                            .read = 5e9,
                            .write = 4e9,
                            .mixed_read_depth = 4,
                            .mixed_write_depth = 8,
                            .mixed_read = 3e9,
                            .mixed_write = 2e9};
  const DrivesProfile drives = to_profile(report);
  EXPECT_EQ(drives.count, 2u);
  EXPECT_EQ(drives.settings, (DriveSettings{4 * kMiB, 4, 8}));
  EXPECT_DOUBLE_EQ(drives.read, 5e9);
  EXPECT_DOUBLE_EQ(drives.write, 4e9);
  EXPECT_DOUBLE_EQ(drives.mixed_read, 3e9);
  EXPECT_DOUBLE_EQ(drives.mixed_write, 2e9);
}

}  // namespace
}  // namespace overspill
