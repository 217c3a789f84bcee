// Rates of ops from a profile, and what sharing does to them.
#include "engine/plan/cost_model.h"

#include <gtest/gtest.h>

#include "tests/unit/engine/plan/test_models.h"

namespace overspill {
namespace {

TEST(ComputeRate, LiesBetweenItsPointsInLogarithms) {
  DeviceProfile device;
  device.peak_flops = 7;
  EXPECT_DOUBLE_EQ(compute_rate(device, OpKind::forward, 1e6, 100), 7);
  device.compute = {{OpKind::forward, 1e6, 100, 1e9},
                    {OpKind::forward, 1e6, 10000, 4e9},
                    {OpKind::forward, 1e8, 100, 1e11},
                    {OpKind::backward, 1e6, 100, 5e9}};
  EXPECT_NEAR(compute_rate(device, OpKind::forward, 1e6, 100), 1e9, 1);
  EXPECT_NEAR(compute_rate(device, OpKind::forward, 1e6, 1000), 2e9, 1);
  EXPECT_NEAR(compute_rate(device, OpKind::forward, 1e7, 100), 1e10, 10);
  EXPECT_NEAR(compute_rate(device, OpKind::forward, 1e3, 1), 1e9, 1) << "outside: the nearest";
  EXPECT_NEAR(compute_rate(device, OpKind::forward, 1e6, 1e9), 4e9, 10);
  EXPECT_NEAR(compute_rate(device, OpKind::backward, 1e9, 7), 5e9, 10);
}

TEST(UpdateRate, OfRulesThatWereNotMeasuredFollowsTheirBytes) {
  HostProfile host;
  host.memory_bandwidth = 26e9;
  const OptimizerSettings adamw;  // split master: 26 bytes of weight, state and gradient
  EXPECT_NEAR(update_rate(host, adamw), 1e9, 1e3);
  host.updates = {{OptimizerKind::adamw, StateFormat::float32, 5e8}};
  EXPECT_DOUBLE_EQ(update_rate(host, adamw), 5e8);
}

class CostModelTest : public testing::Test {
 protected:
  CostModelTest() : layout_(plan_layout(test::tiny_model(false), test::roomy_options())) {}
  CostModel costs(uint32_t ranks = 1) const { return cost_model(profile_, layout_, ranks); }

  HardwareProfile profile_;
  Layout layout_;
};

TEST_F(CostModelTest, ADriveThatDoesOneThingAtATimeIsAllTaken) {
  profile_.drives = {.read = 4e9, .write = 8e9, .mixed_read = 2e9, .mixed_write = 4e9};
  EXPECT_DOUBLE_EQ(costs().at(OpKind::read, LayerKind::block)[Resource::drives], 1);
  profile_.drives.mixed_read = 4e9;
  profile_.drives.mixed_write = 8e9;
  EXPECT_DOUBLE_EQ(costs().at(OpKind::write, LayerKind::block)[Resource::drives], 0.5);
}

TEST_F(CostModelTest, RanksShareTheMachine) {
  profile_.device.accelerator = true;
  profile_.link = {.h2d = 50e9, .d2h = 40e9, .all_h2d = 120e9, .all_d2h = 1e12};
  const CostModel one = costs(1), four = costs(4);
  const auto rate = [](const CostModel& costs, OpKind kind) {
    return costs.at(kind, LayerKind::block).work_per_second;
  };
  EXPECT_DOUBLE_EQ(rate(four, OpKind::read), rate(one, OpKind::read) / 4);
  EXPECT_DOUBLE_EQ(rate(four, OpKind::update), rate(one, OpKind::update) / 4);
  EXPECT_DOUBLE_EQ(rate(four, OpKind::forward), rate(one, OpKind::forward));
  EXPECT_DOUBLE_EQ(rate(one, OpKind::copy_to_device), 50e9);
  EXPECT_DOUBLE_EQ(rate(four, OpKind::copy_to_device), 30e9) << "behind one root complex";
  EXPECT_DOUBLE_EQ(rate(four, OpKind::copy_to_host), 40e9);
  profile_.device.accelerator = false;
  EXPECT_DOUBLE_EQ(rate(costs(4), OpKind::forward), rate(one, OpKind::forward) / 4);
}

TEST_F(CostModelTest, HostComputeAndUpdatesShareTheCores) {
  EXPECT_DOUBLE_EQ(costs().at(OpKind::backward, LayerKind::block)[Resource::cores], 1);
  EXPECT_DOUBLE_EQ(costs().at(OpKind::update, LayerKind::block)[Resource::cores], 1);
  profile_.device.accelerator = true;
  EXPECT_DOUBLE_EQ(costs().at(OpKind::backward, LayerKind::block)[Resource::cores], 0);
  EXPECT_DOUBLE_EQ(costs().at(OpKind::update, LayerKind::block)[Resource::cores], 0);
}

}  // namespace
}  // namespace overspill
