// Every way of breaking a Program that this file knows, applied at every place of real Programs:
// the verifier refuses all that change what a Program does.
#include <gtest/gtest.h>

#include "engine/base/error.h"
#include "engine/plan/planner.h"
#include "engine/program/verify.h"
#include "tests/unit/engine/plan/test_models.h"
#include "tests/unit/engine/program/mutations.h"

namespace overspill {
namespace {

using test::roomy_options;
using test::tiny_model;

struct Case {
  const char* name;
  friend void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }
  bool tied = false;
  StepKind kind{true, true, true, false, 3};
  void (*change)(PlanOptions&) = [](PlanOptions&) {};
};

void discrete(PlanOptions& o) { o.unified = false; }
void twice(PlanOptions& o) { o.update_twice.assign(5, true); }
void in_backward(PlanOptions& o) {
  o.update = UpdateTiming::in_backward;
  o.gradients = Placement::automatic;
}
void two_ranks(PlanOptions& o) {
  o.ranks = 2;
  o.rank = 1;
}

const Case kCases[] = {
    {"unified"},
    {"discrete_tied", true, {true, true, true, false, 3}, discrete},
    {"first_update", false, {true, true, true, true, 2}, discrete},
    {"in_backward", false, {true, true, false, false, 2}, in_backward},
    {"in_backward_discrete",
     true,
     {true, true, false, true, 2},
     [](PlanOptions& o) {
       in_backward(o);
       o.unified = false;
       o.precision = Precision::float32;
     }},
    {"twice", false, {true, true, true, false, 3}, twice},
    {"twice_discrete",
     true,
     {true, true, true, true, 2},
     [](PlanOptions& o) {
       twice(o);
       o.unified = false;
     }},
    {"two_ranks", false, {true, true, true, false, 2}, two_ranks},
    {"middle_of_three_ranks_twice",
     true,
     {true, true, true, false, 2},
     [](PlanOptions& o) {
       twice(o);
       o.unified = false;
       o.ranks = 3;
       o.rank = 1;
     }},
    {"ranks_with_weights_in_memory",
     false,
     {true, true, true, false, 2},
     [](PlanOptions& o) {
       two_ranks(o);
       o.weights = Placement::host;
     }},
    {"state_in_memory",
     false,
     {true, true, true, false, 2},
     [](PlanOptions& o) {
       o.unified = false;
       o.weights = o.gradients = Placement::host;
       o.optimizer = Placement::device;
     }},
    {"flush", false, {false, false, true, false, 2}, discrete},
    {"evaluation", true, {true, false, false, false, 3}, discrete},
};

class Mutants : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    PlanOptions o = roomy_options();
    o.weights = o.optimizer = o.gradients = o.activations = Placement::nvme;
    o.micro_batches = 3;
    o.prefetch_depth = 1;
    GetParam().change(o);
    layout_ = plan_layout(tiny_model(GetParam().tied), o);
    program_ = plan_step(layout_, GetParam().kind);
    ASSERT_TRUE(accepted(program_));
  }
  bool accepted(const Program& program) const { return accepted(program, layout_); }
  static bool accepted(const Program& program, const Layout& layout) {
    try {
      verify_program(program, layout);
      return true;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::internal);
      return false;
    }
  }
  /// A load that waits for the end of an earlier layer: about when, not about what.
  bool paces(const Op& op, OpId dep) const {
    const Op& before = program_.ops[dep.value];
    const bool loads = op.kind == OpKind::read || op.kind == OpKind::copy_to_device ||
                       op.kind == OpKind::all_gather;
    const bool ends_layer =
        before.lane == Lane::compute && before.index + 1 == program_.kind.micro_batches;
    // A flush has no compute; its layers end with the last op of their updates.
    return loads && (ends_layer || !program_.kind.forward);
  }
  test::Mutated mutated() const {
    return {program_, layout_, [this](const Program& mutant) { return accepted(mutant); },
            [this](const Op& op, OpId dep) { return paces(op, dep); }};
  }

  Layout layout_;
  Program program_;
};

INSTANTIATE_TEST_SUITE_P(Programs, Mutants, testing::ValuesIn(kCases),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_P(Mutants, MissingDependency) { EXPECT_GT(without_dependencies(mutated()), 5u); }
TEST_P(Mutants, Cycle) { EXPECT_GT(with_cycles(mutated()), 5u); }
TEST_P(Mutants, SlotUsedTwice) { EXPECT_GT(with_other_slots(mutated()), 5u); }
TEST_P(Mutants, ShiftedAccess) { EXPECT_GT(with_shifted_accesses(mutated()), 5u); }
TEST_P(Mutants, MissingOp) { EXPECT_GT(without_ops(mutated()), 5u); }
TEST_P(Mutants, SwappedInTheirLane) { EXPECT_GT(swapped_in_lanes(mutated()), 3u); }

TEST_P(Mutants, OverBudget) {
  for (size_t s = 0; s < layout_.slots.size(); ++s) {
    Layout mutant = layout_;
    mutant.slots[s].bytes += 4096;
    EXPECT_FALSE(accepted(program_, mutant)) << "overlaps, or leaves its arena";
    mutant = layout_;
    uint64_t& arena =
        mutant.slots[s].memory == Tier::device ? mutant.device_bytes : mutant.host_bytes;
    mutant.slots[s].offset = arena;
    arena += 64 * kMiB;
    EXPECT_FALSE(accepted(program_, mutant)) << "over the budget";
  }
  Layout mutant = layout_;
  mutant.options.nvme_capacity = layout_.nvme_bytes - 1;
  EXPECT_EQ(accepted(program_, mutant), false);
}

}  // namespace
}  // namespace overspill
