// What pieces of steps move.
#include "engine/plan/fragment_planner.h"

#include <gtest/gtest.h>

#include "engine/train/parameter_groups.h"
#include "tests/unit/engine/plan/test_models.h"

namespace overspill {
namespace {

/// Bytes that a lane moves to bring a layer with its pending update.
uint64_t bytes_to_update(const Layout& layout, uint32_t layer, bool present, Lane lane) {
  FragmentPlanner planner(layout, false);
  planner.bring(layer, {layout.weight_ring[0], present}, true);
  return planner.take().lane_bytes(lane);
}

TEST(FragmentPlanner, WhatIsPresentIsNotFetchedForItsUpdate) {
  PlanOptions o = test::roomy_options();
  o.micro_batches = 0;
  o.unified = false;
  o.prefetch_depth = 1;
  o.weights = Placement::host;
  o.optimizer = o.gradients = Placement::device;
  const Layout layout = plan_layout(test::tiny_model(false), o);
  EXPECT_EQ(bytes_to_update(layout, 1, false, Lane::h2d), 2 * layout.model.layers[1].padded);
  EXPECT_EQ(bytes_to_update(layout, 1, true, Lane::h2d), 0u);
}

TEST(FragmentPlanner, WhatIsFrozenAndPresentIsNotReadAgain) {
  ModelShape model = test::tiny_model(false);
  apply_parameter_groups(model, {{"model.layers.0.input_layernorm"}}, {});
  PlanOptions o = test::roomy_options();
  o.micro_batches = 0;
  o.prefetch_depth = 1;
  o.weights = Placement::nvme;
  o.optimizer = o.gradients = Placement::host;
  const Layout layout = plan_layout(model, o);
  EXPECT_EQ(bytes_to_update(layout, 1, false, Lane::nvme_read), 2 * model.layers[1].padded);
  EXPECT_EQ(bytes_to_update(layout, 1, true, Lane::nvme_read), 0u);
}

}  // namespace
}  // namespace overspill
