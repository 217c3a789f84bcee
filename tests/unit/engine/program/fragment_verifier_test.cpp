// What may be asked of fragments, and when: the state of layers between them.
#include "engine/program/fragment_verifier.h"

#include <gtest/gtest.h>

#include "engine/base/error.h"
#include "engine/plan/fragment_planner.h"
#include "tests/unit/engine/plan/test_models.h"

namespace overspill {
namespace {

/// Weights, state and gradients on NVMe; a device with a memory of its own.
class Fragments : public testing::Test {
 protected:
  void SetUp() override {
    PlanOptions o = test::roomy_options();
    o.weights = o.optimizer = o.gradients = Placement::nvme;
    o.micro_batches = 0;
    o.unified = false;
    o.prefetch_depth = 1;
    o.paged_sums.assign(4, true);
    layout_ = plan_layout(test::tiny_model(false, 2), o);
    verifier_.emplace(layout_);
  }
  SlotId ring(size_t i) const { return layout_.weight_ring[i]; }
  SlotId sums(size_t i) const { return layout_.gradient_ring[i]; }

  /// Plans and verifies a fragment.
  template <class Plan>
  void run(const Plan& plan, bool moments_zero = false) {
    FragmentPlanner planner(layout_, moments_zero);
    plan(planner);
    const Program program = planner.take();
    verifier_->verify(program, planner.parts());
  }
  template <class Call>
  void expect_refusal(const std::string& text, const Call& call) {
    try {
      call();
      ADD_FAILURE() << "accepted: " << text;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::internal);
      EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
    }
  }
  /// A step of layer 1 alone: its update is pending.
  void end_a_step() {
    run([&](auto& f) { f.finish_gradient(1, sums(0), {}); });
    verifier_->end_step({0, 1, 0, 0});
  }

  Layout layout_;
  std::optional<FragmentVerifier> verifier_;
};

TEST_F(Fragments, AStepWithSumsInPages) {
  run([&](auto& f) { f.bring(1, {ring(0), false}, false); });
  run([&](auto& f) { f.store_sums(1, sums(0)); });
  run([&](auto& f) { f.load_sums(1, sums(1)); });
  run([&](auto& f) { f.finish_gradient(1, sums(1), {}); });
  verifier_->end_step({0, 1, 0, 0});
  run([&](auto& f) { f.bring(1, {ring(0), true}, true); }, true);
}

TEST_F(Fragments, APendingUpdateNeedsItsGradientUntilItIsDone) {
  end_a_step();
  const FragmentVerifier before = *verifier_;
  expect_refusal("layer 1: store_sums: the pending update has yet to use the gradient before",
                 [&] { run([&](auto& f) { f.store_sums(1, sums(0)); }); });
  verifier_.emplace(before);
  expect_refusal("layer 1: finish_gradient: the pending update has yet to use",
                 [&] { run([&](auto& f) { f.finish_gradient(1, sums(0), {}); }); });
  verifier_.emplace(before);
  run([&](auto& f) {
    f.update(1, {ring(0), false});
    f.store_sums(1, sums(0));
  });
}

TEST_F(Fragments, WeightsAreNotBroughtBeforeTheirUpdate) {
  end_a_step();
  expect_refusal("layer 1: bring: leaves out the pending update", [&] {
    run([&](auto& f) { f.bring(1, {ring(0), false}, false); });
  });
}

TEST_F(Fragments, AnUpdateIsOfAStepThatHasEnded) {
  expect_refusal("layer 1: update: no update is pending", [&] {
    run([&](auto& f) { f.update(1, {ring(0), false}); });
  });
}

TEST_F(Fragments, StepsEndInOrder) {
  const std::vector<char> layer_1 = {0, 1, 0, 0};
  expect_refusal("layer 1: the step ends before the gradient of its update is complete",
                 [&] { verifier_->end_step(layer_1); });
  verifier_.emplace(layout_);
  end_a_step();
  expect_refusal("layer 1: the step ends before the last one's update is applied",
                 [&] { verifier_->end_step(layer_1); });
}

TEST_F(Fragments, SumsInPagesAreLoadedBeforeMoreIsAdded) {
  run([&](auto& f) { f.store_sums(1, sums(0)); });
  const FragmentVerifier before = *verifier_;
  expect_refusal("layer 1: finish_gradient: its sums are in pages",
                 [&] { run([&](auto& f) { f.finish_gradient(1, sums(0), {}); }); });
  verifier_.emplace(before);
  run([&](auto& f) { f.load_sums(1, sums(1)); });
  expect_refusal("layer 1: store_sums: its sums are in slot",
                 [&] { run([&](auto& f) { f.store_sums(1, sums(0)); }); });
}

TEST_F(Fragments, ThatSumsAreStoredIsNeededToLoadThem) {
  expect_refusal("layer 1: load_sums: its sums are not in pages",
                 [&] { run([&](auto& f) { f.load_sums(1, sums(0)); }); });
}

TEST_F(Fragments, WhatIsPresentMustBeThere) {
  const auto present = [&] { run([&](auto& f) { f.bring(1, {ring(0), true}, false); }); };
  expect_refusal("layer 1: W1.0 is not in its newest version in slot", present);
  verifier_.emplace(layout_);
  run([&](auto& f) { f.bring(1, {ring(0), false}, false); });
  present();
  const FragmentVerifier before = *verifier_;
  verifier_->forget();
  expect_refusal("layer 1: W1.0 is not in its newest version in slot", present);
  verifier_.emplace(before);
  run([&](auto& f) { f.bring(2, {ring(0), false}, false); });
  expect_refusal("layer 1: W1.0 is not in its newest version in slot", present);
}

TEST_F(Fragments, AnUpdateAloneLeavesOldWeightsInTheRing) {
  run([&](auto& f) { f.bring(1, {ring(0), false}, false); });
  end_a_step();
  run([&](auto& f) { f.update(1, {ring(0), true}); });
  expect_refusal("layer 1: W1.0 is not in its newest version in slot", [&] {
    run([&](auto& f) { f.bring(1, {ring(0), true}, false); });
  });
}

}  // namespace
}  // namespace overspill
