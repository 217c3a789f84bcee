// Learning rates against transformers' formulas (get_constant_schedule_with_warmup,
// get_linear_schedule_with_warmup, get_cosine_schedule_with_warmup), computed by hand.
#include "optim/lr_schedule.h"

#include <gtest/gtest.h>

namespace overspill {
namespace {

constexpr double kNear = 1e-15;

TEST(LrSchedule, WarmupRisesFromZeroInEqualSteps) {
  for (const LrScheduler kind : {LrScheduler::constant, LrScheduler::linear, LrScheduler::cosine}) {
    const LrSchedule s{kind, 0.008, 4, 12};
    EXPECT_EQ(s.at(0), 0.0);
    EXPECT_NEAR(s.at(1), 0.002, kNear);
    EXPECT_NEAR(s.at(2), 0.004, kNear);
    EXPECT_NEAR(s.at(3), 0.006, kNear);
    EXPECT_NEAR(s.at(4), 0.008, kNear);
  }
}

TEST(LrSchedule, ConstantStaysAfterWarmup) {
  const LrSchedule s{LrScheduler::constant, 0.008, 4, 12};
  for (const uint64_t step : {5, 11, 12, 1000}) EXPECT_EQ(s.at(step), 0.008) << step;
}

TEST(LrSchedule, LinearFallsToZeroAtTheEnd) {
  const LrSchedule s{LrScheduler::linear, 0.008, 4, 12};  // (12 - step) / 8 of it
  EXPECT_NEAR(s.at(5), 0.007, kNear);
  EXPECT_NEAR(s.at(8), 0.004, kNear);
  EXPECT_NEAR(s.at(11), 0.001, kNear);
  EXPECT_EQ(s.at(12), 0.0);
  EXPECT_EQ(s.at(13), 0.0);
}

TEST(LrSchedule, CosineFallsHalfAWave) {
  const LrSchedule s{LrScheduler::cosine, 0.008, 4, 12};  // 0.004 (1 + cos(pi (step - 4) / 8))
  EXPECT_NEAR(s.at(5), 0.004 * (1 + 0.92387953251128676), kNear);
  EXPECT_NEAR(s.at(6), 0.004 * (1 + 0.70710678118654752), kNear);
  EXPECT_NEAR(s.at(8), 0.004, kNear);
  EXPECT_NEAR(s.at(10), 0.004 * (1 - 0.70710678118654752), kNear);
  EXPECT_NEAR(s.at(11), 0.004 * (1 - 0.92387953251128676), kNear);
  EXPECT_NEAR(s.at(12), 0.0, kNear);
  EXPECT_NEAR(s.at(50), 0.0,
              kNear);  // transformers' rises again past the end: we never train there
}

TEST(LrSchedule, WithoutWarmupStartsAtTheFullRate) {
  EXPECT_EQ((LrSchedule{LrScheduler::constant, 0.5, 0, 10}.at(0)), 0.5);
  EXPECT_EQ((LrSchedule{LrScheduler::linear, 0.5, 0, 10}.at(0)), 0.5);
  EXPECT_NEAR((LrSchedule{LrScheduler::linear, 0.5, 0, 10}.at(9)), 0.05, kNear);
  EXPECT_EQ((LrSchedule{LrScheduler::cosine, 0.5, 0, 10}.at(0)), 0.5);
  EXPECT_NEAR((LrSchedule{LrScheduler::cosine, 0.5, 0, 10}.at(5)), 0.25, kNear);
}

TEST(LrSchedule, WarmupAsLongAsTheRunOrLonger) {
  EXPECT_NEAR((LrSchedule{LrScheduler::cosine, 0.5, 10, 10}.at(9)), 0.45, kNear);
  EXPECT_NEAR((LrSchedule{LrScheduler::linear, 0.5, 20, 10}.at(9)), 0.225, kNear);
  EXPECT_EQ((LrSchedule{LrScheduler::linear, 0.5, 20, 10}.at(20)), 0.5);
}

}  // namespace
}  // namespace overspill
