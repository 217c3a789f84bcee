// What comes next, and when a program does something else.
#include "engine/pager/access_order.h"

#include <gtest/gtest.h>

namespace overspill {
namespace {

using Layers = std::vector<uint32_t>;

TEST(AccessOrder, GuessesWhileItRecords) {
  AccessOrder order(4);
  EXPECT_EQ(order.next(2), (Layers{0, 1}));
  for (const uint32_t layer : {0, 1, 2}) EXPECT_FALSE(order.visit(layer));
  EXPECT_EQ(order.next(2), (Layers{3}));
  for (const uint32_t layer : {3, 2}) EXPECT_FALSE(order.visit(layer));
  EXPECT_EQ(order.next(5), (Layers{1, 0}));
}

TEST(AccessOrder, RepeatsTheFirstStep) {
  AccessOrder order(3);
  for (const uint32_t layer : {0, 2, 0}) order.visit(layer);
  order.end_step();
  EXPECT_EQ(order.next(9), (Layers{0, 2, 0}));
  EXPECT_FALSE(order.visit(0));
  EXPECT_EQ(order.next(1), (Layers{2}));
}

TEST(AccessOrder, LearnsFromAStepThatDeviates) {
  AccessOrder order(3);
  for (const uint32_t layer : {0, 1, 2, 0, 1, 2, 1, 0}) order.visit(layer);  // an evaluation first
  order.end_step();
  const Layers step = {0, 1, 2, 1, 0};
  for (const uint32_t layer : step) order.visit(layer);
  order.end_step();
  EXPECT_EQ(order.next(9), step);
  for (const uint32_t layer : step) EXPECT_FALSE(order.visit(layer));
  order.end_step();
  EXPECT_FALSE(order.visit(0));
  order.restart();
  for (const uint32_t layer : step) EXPECT_FALSE(order.visit(layer));
}

TEST(AccessOrder, KeepsADeclaredOrder) {
  AccessOrder order(2);
  order.declare({0, 1});
  EXPECT_EQ(order.visit(1), 0u);
  order.end_step();
  EXPECT_EQ(order.next(2), (Layers{0, 1}));
}

TEST(AccessOrder, RemembersNoStepThatNeverEnds) {
  AccessOrder order(2);
  for (uint32_t i = 0; i < 3 << 20; ++i) order.visit(i % 2);
  order.end_step();
  EXPECT_EQ(order.next(1), (Layers{0}));  // a guess still
  EXPECT_FALSE(order.visit(1));
}

TEST(AccessOrder, GoesOnBehindADeviation) {
  AccessOrder order(4);
  order.declare({0, 1, 2, 3, 2, 1, 0});
  EXPECT_FALSE(order.visit(0));
  EXPECT_EQ(order.visit(3), 1u);  // skips two layers
  EXPECT_EQ(order.next(2), (Layers{2, 1}));
  EXPECT_EQ(order.visit(3), 2u);  // again
  EXPECT_FALSE(order.visit(2));
  EXPECT_FALSE(order.visit(1));
  EXPECT_FALSE(order.visit(0));
  EXPECT_TRUE(order.next(3).empty());
  EXPECT_EQ(order.visit(1), 0u);  // beyond the step's end
  order.end_step();
  EXPECT_EQ(order.next(1), (Layers{0}));
}

TEST(AccessOrder, KnowsLayersThatAreNotInIt) {
  AccessOrder order(4);
  order.declare({0, 1});
  EXPECT_EQ(order.visit(3), 0u);
  EXPECT_FALSE(order.visit(0));
}

}  // namespace
}  // namespace overspill
