// The split master: exact for every finite float, in the functions and through the update's
// kernels, and what its weight is at the edges.
#include "optim/split_master.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <vector>

#include "engine/base/dtype.h"
#include "engine/base/parallel.h"
#include "optim/optimizer.h"

namespace overspill {
namespace {

constexpr uint32_t kInfinity = 0x7f800000u, kSign = 0x80000000u;

uint32_t rejoined(uint32_t bits) {
  const SplitMaster split = split_master(std::bit_cast<float>(bits));
  return std::bit_cast<uint32_t>(join_master(split.weight, split.remainder));
}

float weight_of(float master) { return bf16_to_float(split_master(master).weight); }

/// Counts the bit patterns of [first, last) with this step that do not come back.
uint64_t lost(uint64_t first, uint64_t last, uint64_t step) {
  uint64_t count = 0;
  for (uint64_t bits = first; bits < last; bits += step) {
    count += rejoined(static_cast<uint32_t>(bits)) != static_cast<uint32_t>(bits);
  }
  return count;
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr uint32_t kHighStep = 97;  // a sample: sanitizers make it slow
#else
constexpr uint32_t kHighStep = 1;
#endif

/// Calls check(high) for the high halves of finite floats, in parallel.
template <class Check>
void for_finite_highs(const Check& check) {
  parallel_for((0x10000 + kHighStep - 1) / kHighStep, [&](uint64_t i) {
    const auto high = static_cast<uint32_t>(i) * kHighStep;
    if ((high & 0x7f80u) != 0x7f80u) check(high);
  });
}

TEST(SplitMaster, RejoinsEveryFiniteFloatExactly) {
  std::atomic<uint64_t> count = 0;
  for_finite_highs([&](uint32_t high) {
    uint64_t differ = 0;
    for (uint32_t low = 0; low < 0x10000; ++low) {
      const uint32_t bits = high << 16 | low;
      differ += rejoined(bits) != bits;
    }
    count += differ;
  });
  EXPECT_EQ(count, 0u);
}

TEST(SplitMaster, EveryFiniteFloatPassesThroughAnUpdateThatMovesNothing) {
  constexpr uint64_t kSize = 0x10000;
  const OptimizerSettings settings{.kind = OptimizerKind::sgd, .momentum = 0};
  const double rate = 0;
  const UpdateStep step = update_step(settings, std::span(&rate, 1), 1, 1.0);
  const std::vector<uint16_t> gradient(kSize);
  std::vector<int16_t> lows(kSize);
  for (uint64_t i = 0; i < kSize; ++i) lows[i] = static_cast<int16_t>(i);
  std::atomic<uint64_t> changed = 0;
  for_finite_highs([&](uint32_t high) {
    // A remainder of 0x8000 or more is negative: its weight is one unit larger.
    std::vector<uint16_t> weight(kSize, static_cast<uint16_t>(high));
    std::fill(weight.begin() + kSize / 2, weight.end(), static_cast<uint16_t>(high + 1));
    std::vector<int16_t> remainder = lows;
    const std::vector<uint16_t> before = weight;
    const UpdateRun run{0, kSize};
    update_chunk(settings, step,
                 {reinterpret_cast<std::byte*>(weight.data()),
                  reinterpret_cast<std::byte*>(remainder.data()),
                  reinterpret_cast<const std::byte*>(gradient.data()), kSize, 0, 0, 0},
                 std::span(&run, 1), false);
    if (weight != before || remainder != lows) ++changed;
  });
  EXPECT_EQ(changed, 0u);
}

TEST(SplitMaster, RejoinsEveryLowHalfAtTheEdges) {
  // Zero and subnormals, the smallest normal, one, 2^24, the largest finite; both signs.
  for (const uint32_t high : {0x0000u, 0x0001u, 0x007fu, 0x0080u, 0x3f7fu, 0x3f80u, 0x3f81u,
                              0x4b7fu, 0x4b80u, 0x7f00u, 0x7f7eu, 0x7f7fu}) {
    for (const uint64_t sign : {uint64_t{0}, uint64_t{kSign}}) {
      const uint64_t first = (uint64_t{high} << 16) | sign;
      EXPECT_EQ(lost(first, first + 0x10000, 1), 0u) << std::hex << first;
    }
  }
}

TEST(SplitMaster, WeightIsTheNearestBf16) {
  for (uint64_t bits = 0x00800000; bits < 0x7f000000; bits += 0x3fd7) {
    const auto master = std::bit_cast<float>(static_cast<uint32_t>(bits));
    const auto below = std::bit_cast<float>(static_cast<uint32_t>(bits) & 0xffff0000u);
    const auto above = std::bit_cast<float>((static_cast<uint32_t>(bits) & 0xffff0000u) + 0x10000u);
    const double down = double{master} - below, up = double{above} - master;
    ASSERT_EQ(weight_of(master), down < up ? below : above) << std::hex << bits;
    ASSERT_EQ(weight_of(-master), -weight_of(master));
  }
}

TEST(SplitMaster, TiesRoundAwayFromZero) {
  // Round to nearest even would give 1 for the first.
  EXPECT_EQ(weight_of(1.0f + 0x1p-8f), 1.0f + 0x1p-7f);
  EXPECT_EQ(weight_of(1.0f + 3 * 0x1p-8f), 1.0f + 2 * 0x1p-7f);
  EXPECT_EQ(weight_of(-1.0f - 0x1p-8f), -1.0f - 0x1p-7f);
  EXPECT_EQ(split_master(1.0f + 0x1p-8f).remainder, std::numeric_limits<int16_t>::min());
}

TEST(SplitMaster, Bf16ValuesHaveNoRemainder) {
  for (uint32_t high = 0; high < 0x7f80; ++high) {
    const SplitMaster split = split_master(bf16_to_float(static_cast<uint16_t>(high)));
    ASSERT_EQ(split.weight, high);
    ASSERT_EQ(split.remainder, 0);
  }
  EXPECT_EQ(split_master(-0.0f).weight, 0x8000);
  EXPECT_TRUE(std::signbit(join_master(0x8000, 0)));
}

TEST(SplitMaster, MastersAboveTheLargestBf16ComputeAsInfinityButAreKept) {
  const float largest_bf16 = bf16_to_float(0x7f7f);
  // Within half a unit of it the weight is the largest finite bf16; from there to FLT_MAX it is
  // infinite, so the next loss is non-finite and the step is skipped. The master is still exact.
  const float half_unit = std::bit_cast<float>(0x7f7f7fffu);
  EXPECT_EQ(weight_of(half_unit), largest_bf16);
  EXPECT_EQ(weight_of(std::nextafter(half_unit, INFINITY)), INFINITY);
  EXPECT_EQ(weight_of(-std::numeric_limits<float>::max()), -INFINITY);
  EXPECT_EQ(lost(0x7f7f8000, kInfinity, 1), 0u);
}

TEST(SplitMaster, InfinityStaysInfinite) {
  EXPECT_EQ(rejoined(kInfinity), kInfinity);
  EXPECT_EQ(rejoined(kInfinity | kSign), kInfinity | kSign);
}

TEST(SplitMaster, NanRejoinsExactlyButItsWeightMayBeAnything) {
  // Of the 2^24 NaNs all rejoin; those that round up across the sign bit lose NaN in the weight,
  // which is why updates are skipped when anything is non-finite.
  EXPECT_EQ(lost(kInfinity + 1, kSign, 0x101), 0u);
  EXPECT_EQ(split_master(std::bit_cast<float>(0x7fffffffu)).weight, 0x8000);  // NaN -> -0
  EXPECT_TRUE(std::isnan(weight_of(std::numeric_limits<float>::quiet_NaN())));
}

}  // namespace
}  // namespace overspill
