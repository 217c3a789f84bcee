// Taken ranges do not overlap, and what comes back can be taken again, whole.
#include "engine/pager/free_ranges.h"

#include <gtest/gtest.h>

#include "engine/base/random.h"

namespace overspill {
namespace {

constexpr uint64_t kPage = 4096;

TEST(FreeRanges, TakesTheFirstThatFits) {
  FreeRanges free(10 * kPage);
  EXPECT_EQ(free.take(4 * kPage), 0u);
  EXPECT_EQ(free.take(4 * kPage), 4 * kPage);
  EXPECT_FALSE(free.take(4 * kPage));
  free.give_back(0, 4 * kPage);
  EXPECT_EQ(free.take(2 * kPage), 0u);
  EXPECT_EQ(free.take(2 * kPage), 2 * kPage);
  EXPECT_EQ(free.take(2 * kPage), 8 * kPage);
  EXPECT_FALSE(free.take(kPage));
}

TEST(FreeRanges, JoinsNeighboursWhateverTheOrder) {
  for (uint64_t seed = 0; seed < 50; ++seed) {
    SCOPED_TRACE(seed);
    FreeRanges free(64 * kPage);
    std::map<uint64_t, uint64_t> taken;
    for (uint64_t turn = 0; turn < 200; ++turn) {
      if (random_below(seed, 3 * turn, 2) == 0 || taken.empty()) {
        const uint64_t bytes = (1 + random_below(seed, 3 * turn + 1, 12)) * kPage;
        const auto at = free.take(bytes);
        if (!at) continue;
        for (const auto& [other, size] : taken) {
          EXPECT_TRUE(*at + bytes <= other || other + size <= *at);
        }
        taken[*at] = bytes;
      } else {
        auto which = taken.begin();
        std::advance(which, random_below(seed, 3 * turn + 2, taken.size()));
        free.give_back(which->first, which->second);
        taken.erase(which);
      }
    }
    for (const auto& [at, bytes] : taken) free.give_back(at, bytes);
    EXPECT_EQ(free.take(64 * kPage), 0u);
  }
}

TEST(FreeRanges, OfNothingIsNothing) {
  FreeRanges free(0);
  EXPECT_FALSE(free.take(kPage));
}

}  // namespace
}  // namespace overspill
