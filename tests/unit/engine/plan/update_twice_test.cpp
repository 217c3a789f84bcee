// Programs of layers that are updated twice: without writing in the forward, and again, written, in
// the backward. Which layers can; what verifies; when the repeated update may begin.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "engine/base/error.h"
#include "engine/plan/planner.h"
#include "engine/program/dump.h"
#include "engine/program/verify.h"
#include "engine/train/parameter_groups.h"
#include "tests/unit/engine/plan/test_models.h"

namespace overspill {
namespace {

using test::roomy_options;
using test::tiny_model;

constexpr StepKind kSteady{true, true, true, false, 2};

/// Weights, optimizer state and gradients on NVMe, every layer asked to be updated twice.
PlanOptions twice_options(const ModelShape& model) {
  PlanOptions o = roomy_options();
  o.weights = o.optimizer = o.gradients = Placement::nvme;
  o.activations = Placement::device;
  o.update_twice.assign(model.layers.size(), true);
  return o;
}

void expect_verified(const Layout& layout, const StepKind& kind) {
  const Program program = plan_step(layout, kind);
  ASSERT_NO_THROW(verify_program(program, layout))
      << dump_layout(layout) << dump_program(program, layout);
}

TEST(UpdateTwice, EveryPlacementAndChoiceOfLayersVerifies) {
  constexpr Placement tiers[] = {Placement::device, Placement::host, Placement::nvme};
  constexpr OptimizerKind kinds[] = {OptimizerKind::adamw, OptimizerKind::sgd,
                                     OptimizerKind::adafactor};
  for (uint32_t n = 0; n < 9 * 64; ++n) {
    ModelShape model = tiny_model(n % 2 == 0);
    if (n % 5 == 0)
      apply_parameter_groups(model, {{"model.layers.[02].self_attn", "model.norm"}}, {});
    if (n % 5 == 1) apply_parameter_groups(model, {{"model.norm"}}, {});  // no backward
    PlanOptions o = twice_options(model);
    o.gradients = tiers[n % 3];
    o.activations = tiers[n / 3 % 3];
    o.unified = n / 9 % 2 == 0;
    o.precision = n / 18 % 2 == 0 ? Precision::bf16 : Precision::float32;
    o.optimizer_settings.kind = kinds[n / 7 % 3];
    o.prefetch_depth = n / 36 % 4;
    o.micro_batches = 1 + n / 11 % 3;
    o.chunk_parameters = n % 4 == 0 ? 4096 : 12288;
    for (size_t l = 0; l < model.layers.size(); ++l) o.update_twice[l] = (n >> l) % 4 != 0;
    const Layout layout = plan_layout(model, o);
    for (const bool zero : {false, true}) {
      ASSERT_NO_FATAL_FAILURE(expect_verified(layout, {true, true, true, zero, o.micro_batches}));
      ASSERT_NO_FATAL_FAILURE(expect_verified(layout, {false, false, true, zero, 1}));
    }
    ASSERT_NO_FATAL_FAILURE(expect_verified(layout, {true, true, false, false, 1}));
    ASSERT_NO_FATAL_FAILURE(expect_verified(layout, {true, false, true, false, 1}));
  }
}

TEST(UpdateTwice, OnlyLayersWithWeightsAndStateOnNvmeThatTrain) {
  const ModelShape model = tiny_model(false);
  PlanOptions o = twice_options(model);
  EXPECT_EQ(plan_layout(model, o).layers_updated_twice(), (std::vector<uint32_t>{0, 1, 2, 3, 4}));
  EXPECT_EQ(plan_layout(tiny_model(true), o).layers_updated_twice(),
            (std::vector<uint32_t>{1, 2, 3, 4}))
      << "the head loads a tied embedding between its updates";
  o.weights = Placement::host;
  EXPECT_TRUE(plan_layout(model, o).layers_updated_twice().empty());
  o.weights = Placement::nvme;
  o.optimizer = Placement::host;
  EXPECT_TRUE(plan_layout(model, o).layers_updated_twice().empty());
  o.optimizer = Placement::nvme;
  o.update_twice = {0, 1, 0, 0, 1};
  EXPECT_EQ(plan_layout(model, o).layers_updated_twice(), (std::vector<uint32_t>{1, 4}));
  ModelShape frozen = model;
  apply_parameter_groups(frozen, {{"model.layers.1"}}, {});
  o.update_twice.assign(5, true);
  EXPECT_EQ(plan_layout(frozen, o).layers_updated_twice(), (std::vector<uint32_t>{2}));
  o.update = UpdateTiming::in_backward;
  o.gradients = Placement::automatic;
  EXPECT_THROW(plan_layout(model, o), Error);
}

TEST(UpdateTwice, ReadsTheStateAgainAndWritesAsMuch) {
  const ModelShape model = tiny_model(false);
  for (const bool unified : {true, false}) {
    PlanOptions o = twice_options(model);
    o.unified = unified;
    o.prefetch_depth = 0;
    o.update_twice = {0, 1, 0, 1, 1};
    const Program twice = plan_step(plan_layout(model, o), kSteady);
    o.update_twice.clear();
    const Program once = plan_step(plan_layout(model, o), kSteady);
    const uint64_t blocks = 2 * model.layers[1].padded, head = model.layers[4].padded;
    // A block's backward reads 14 instead of 2; the head's none.
    EXPECT_EQ(twice.lane_bytes(Lane::nvme_read),
              once.lane_bytes(Lane::nvme_read) + 12 * blocks + 14 * head);
    EXPECT_EQ(twice.lane_bytes(Lane::nvme_write), once.lane_bytes(Lane::nvme_write));
    EXPECT_EQ(twice.lane_bytes(Lane::h2d), once.lane_bytes(Lane::h2d));
  }
}

TEST(UpdateTwice, TheForwardWritesNothing) {
  const ModelShape model = tiny_model(false);
  const Program program = plan_step(plan_layout(model, twice_options(model)), kSteady);
  const auto loss = std::ranges::find(program.ops, OpKind::loss, &Op::kind);
  ASSERT_NE(loss, program.ops.end());
  EXPECT_EQ(std::ranges::count(program.ops.begin(), loss, OpKind::write, &Op::kind), 0);
  EXPECT_GT(std::ranges::count(loss, program.ops.end(), OpKind::write, &Op::kind), 0);
}

TEST(UpdateTwice, FlushesAndEvaluationsAreAsEver) {
  const ModelShape model = tiny_model(false);
  PlanOptions o = twice_options(model);
  const Layout twice = plan_layout(model, o);
  o.update_twice.clear();
  Layout once = twice;
  once.options = o;
  for (const StepKind& kind :
       {StepKind{false, false, true, false, 2}, StepKind{true, false, false, false, 2},
        StepKind{true, true, false, false, 2}, StepKind{true, false, true, false, 2}}) {
    EXPECT_EQ(dump_program(plan_step(twice, kind), twice),
              dump_program(plan_step(once, kind), once));
  }
}

/// With depth 1, what a layer's repeated update reads does not wait for the backward of the layer
/// above it, nor do its updates; so they run beside that.
TEST(UpdateTwice, RepeatsRunUnderTheBackwardOfTheLayerAbove) {
  for (const bool unified : {true, false}) {
    const ModelShape model = tiny_model(false, 5);
    PlanOptions o = twice_options(model);
    o.unified = unified;
    o.prefetch_depth = 1;
    const Layout layout = plan_layout(model, o);
    const Program program = plan_step(layout, kSteady);
    const HappensBefore order(program);
    std::vector<OpId> backward(model.layers.size());
    for (uint32_t i = 0; i < program.ops.size(); ++i) {
      const Op& op = program.ops[i];
      if (op.kind == OpKind::backward) backward[op.layer] = OpId{i};
    }
    std::vector<uint32_t> updates(model.layers.size());
    size_t beside = 0;
    for (uint32_t i = 0; i < program.ops.size(); ++i) {
      const Op& op = program.ops[i];
      if (op.kind != OpKind::update) continue;
      const bool repeated = ++updates[op.layer] > layout.chunk_count(op.layer);
      if (!repeated || op.layer + 1 >= model.head()) continue;
      EXPECT_FALSE(order.ordered(backward[op.layer + 1], OpId{i})) << op.layer << "." << op.index;
      ++beside;
    }
    EXPECT_GT(beside, 10u);
  }
}

class UpdateTwiceMutants : public testing::Test {
 protected:
  UpdateTwiceMutants()
      : model_(tiny_model(false)), layout_(plan_layout(model_, twice_options(model_))) {
    program_ = plan_step(layout_, kSteady);
  }
  /// The n-th op of a kind that touches a page of some kind of the layer.
  Op& op_on(OpKind kind, PageKind page, uint32_t layer, size_t n) {
    for (Op& op : program_.ops) {
      const auto touched = program_.accesses_of(op);
      const bool touches = std::ranges::any_of(
          touched, [&](const Access& a) { return layout_.page(a.page).kind == page; });
      if (op.kind == kind && op.layer == layer && touches && n-- == 0) return op;
    }
    throw std::runtime_error("no such op");
  }
  bool refused() const {
    try {
      verify_program(program_, layout_);
      return false;
    } catch (const Error&) {
      return true;
    }
  }

  ModelShape model_;
  Layout layout_;
  Program program_;
};

TEST_F(UpdateTwiceMutants, NoneIsFine) { EXPECT_FALSE(refused()); }

TEST_F(UpdateTwiceMutants, RepeatingFromTheNewWeights) {
  // The repeated update's read leaves out the old weights, so that it finds the new ones.
  Op& read = op_on(OpKind::read, PageKind::weight, 2, layout_.chunk_count(2));
  ++read.first_access;
  --read.access_count;
  EXPECT_TRUE(refused());
}

TEST_F(UpdateTwiceMutants, WritingInTheForward) {
  // As the plan of one update does: its writes come before the backward's reads.
  Layout once = layout_;
  once.options.update_twice.clear();
  program_ = plan_step(once, kSteady);
  EXPECT_TRUE(refused());
}

TEST_F(UpdateTwiceMutants, NotRepeating) {
  Op& update = op_on(OpKind::update, PageKind::weight, 2, layout_.chunk_count(2));
  update.kind = OpKind::copy_to_host;
  EXPECT_TRUE(refused());
}

TEST_F(UpdateTwiceMutants, ComputingWithTheOldWeights) {
  // The backward's own loads of weights in a plan of one update, without its writes.
  for (Op& op : program_.ops) {
    if (op.kind == OpKind::update && op.layer == 2) op.access_count = 0;
  }
  EXPECT_TRUE(refused());
}

}  // namespace
}  // namespace overspill
