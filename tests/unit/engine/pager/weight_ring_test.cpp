// The slot that was used least recently goes first, unless somebody needs it.
#include "engine/pager/weight_ring.h"

#include <gtest/gtest.h>

namespace overspill {
namespace {

class WeightRingTest : public testing::Test {
 protected:
  void put(uint32_t layer) {
    WeightRing::Entry* entry = ring_.victim({});
    ASSERT_NE(entry, nullptr);
    entry->layer = layer;
    ring_.use(*entry);
  }

  WeightRing ring_{{SlotId{10}, SlotId{11}, SlotId{12}}};
};

TEST_F(WeightRingTest, TakesEmptySlotsFirst) {
  for (const uint32_t layer : {5u, 6u, 7u}) put(layer);
  EXPECT_EQ(ring_.find(5)->slot, SlotId{10});
  EXPECT_EQ(ring_.find(7)->slot, SlotId{12});
  EXPECT_EQ(ring_.find(8), nullptr);
}

TEST_F(WeightRingTest, EvictsTheOldestThatNobodyNeeds) {
  for (const uint32_t layer : {5u, 6u, 7u}) put(layer);
  ring_.use(*ring_.find(5));
  EXPECT_EQ(ring_.victim({})->layer, 6u);
  ring_.find(6)->holds = 1;
  EXPECT_EQ(ring_.victim({})->layer, 7u);
  const std::vector<uint32_t> keep = {7};
  EXPECT_EQ(ring_.victim(keep)->layer, 5u);
  ring_.find(5)->holds = 2;
  EXPECT_EQ(ring_.victim(keep), nullptr);
  EXPECT_EQ(ring_.held(), 2u);
}

TEST_F(WeightRingTest, ForgetsAll) {
  put(5);
  ring_.clear();
  EXPECT_EQ(ring_.find(5), nullptr);
  EXPECT_EQ(ring_.victim({})->slot, SlotId{10});
}

}  // namespace
}  // namespace overspill
