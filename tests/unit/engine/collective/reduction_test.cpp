// Sums in the order of ranks, and how parts are cut.
#include "engine/collective/reduction.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "engine/base/dtype.h"
#include "engine/collective/group.h"

namespace overspill {
namespace {

TEST(Reduction, AddsInTheOrderOfRanks) {
  // 1e8 + 1 - 1e8 is 0 in float32, in another order 1.
  const std::vector<float> a(5000, 1e8f), b(5000, 1.0f), c(5000, -1e8f);
  std::vector<float> sum(5000);
  const std::vector<const float*> in_order = {a.data(), b.data(), c.data()};
  sum_in_rank_order(in_order, sum);
  for (const float value : sum) ASSERT_EQ(value, 0.0f);
  const std::vector<const float*> other = {a.data(), c.data(), b.data()};
  sum_in_rank_order(other, sum);
  for (const float value : sum) ASSERT_EQ(value, 1.0f);
}

TEST(Reduction, SumMayLieOverAnyContribution) {
  for (int place = 0; place < 3; ++place) {
    std::vector<std::vector<float>> all(3, std::vector<float>(4097));
    for (size_t i = 0; i < 4097; ++i) {
      for (int r = 0; r < 3; ++r) all[r][i] = static_cast<float>(i * 3 + r);
    }
    const std::vector<const float*> contributions = {all[0].data(), all[1].data(), all[2].data()};
    sum_in_rank_order(contributions, all[place]);
    for (size_t i = 0; i < 4097; ++i) ASSERT_EQ(all[place][i], static_cast<float>(i * 9 + 3));
  }
}

TEST(Reduction, KeepsNegativeZeroOfAnOnlyRank) {
  const float zero = -0.0f;
  float sum = 1;
  const float* const contributions[] = {&zero};
  sum_in_rank_order(std::span<const float* const>(contributions), {&sum, 1});
  EXPECT_TRUE(std::signbit(sum));
}

TEST(Reduction, RoundsToNearestEvenAndKeepsNaN) {
  const std::vector<float> values = {1.0f + 0x1p-8f, 1.0f + 3 * 0x1p-8f,
                                     std::numeric_limits<float>::max(),
                                     std::numeric_limits<float>::quiet_NaN(), -2.0f};
  std::vector<uint16_t> rounded(values.size());
  std::vector<float> back(values.size());
  round_to_bf16(values, rounded.data());
  widen_bf16(rounded.data(), back);
  EXPECT_EQ(back[0], 1.0f);
  EXPECT_EQ(back[1], 1.0f + 0x1p-6f);
  EXPECT_TRUE(std::isinf(back[2]));
  EXPECT_TRUE(std::isnan(back[3]));
  EXPECT_EQ(back[4], -2.0f);
}

TEST(Partition, CoversAllWithLongerPartsFirst) {
  for (const uint64_t total : {0ull, 1ull, 7ull, 8ull, 1001ull, 10'000'000'003ull}) {
    const Partition parts{.total = total, .ranks = 4};
    uint64_t next = 0;
    for (uint32_t rank = 0; rank < 4; ++rank) {
      EXPECT_EQ(parts.begin(rank), next);
      EXPECT_EQ(parts.length(rank), total / 4 + (rank < total % 4));
      next += parts.length(rank);
    }
    EXPECT_EQ(next, total);
  }
}

TEST(Partition, LastPieceIsShorterAndThenComesNone) {
  EXPECT_EQ(piece_length(10, 4, 1), 4u);
  EXPECT_EQ(piece_length(10, 4, 2), 2u);
  EXPECT_EQ(piece_length(10, 4, 3), 0u);
  EXPECT_EQ(piece_length(8, 4, 2), 0u);
  EXPECT_EQ(piece_length(0, 4, 0), 0u);
}

}  // namespace
}  // namespace overspill
