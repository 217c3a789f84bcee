// Programs of every placement, timing and mode pass the independent verifier; byte counts are the
// design's; dumps are stable.
#include "engine/plan/planner.h"

#include <gtest/gtest.h>

#include "engine/base/error.h"
#include "engine/program/dump.h"
#include "engine/program/verify.h"
#include "tests/unit/engine/plan/test_models.h"

namespace overspill {
namespace {

using test::roomy_options;
using test::tiny_model;

std::vector<StepKind> kinds_of(const PlanOptions& o) {
  const uint32_t mb = o.micro_batches;
  std::vector<StepKind> kinds = {{true, true, false, false, mb}, {true, false, false, false, mb}};
  if (o.update == UpdateTiming::next_forward) {
    kinds.push_back({true, true, true, true, mb});
    kinds.push_back({true, true, true, false, mb});
    kinds.push_back({false, false, true, false, mb});
    kinds.push_back({false, false, true, true, mb});
  } else {
    kinds.push_back({true, true, false, true, mb});
  }
  return kinds;
}

TEST(Planner, EveryPlacementVerifies) {
  constexpr Placement tiers[] = {Placement::device, Placement::host, Placement::nvme};
  size_t programs = 0;
  for (const bool tied : {false, true}) {
    for (const bool unified : {true, false}) {
      for (const Precision precision : {Precision::bf16, Precision::float32}) {
        for (const UpdateTiming update : {UpdateTiming::next_forward, UpdateTiming::in_backward}) {
          for (uint32_t combination = 0; combination < 81; ++combination) {
            PlanOptions o = roomy_options();
            o.unified = unified;
            o.precision = precision;
            o.update = update;
            o.weights = tiers[combination % 3];
            o.optimizer = tiers[combination / 3 % 3];
            o.gradients = tiers[combination / 9 % 3];
            o.activations = tiers[combination / 27 % 3];
            o.prefetch_depth = combination % 4;
            o.micro_batches = 1 + combination % 3;
            const Layout layout = plan_layout(tiny_model(tied), o);
            for (const StepKind& kind : kinds_of(o)) {
              const Program program = plan_step(layout, kind);
              ASSERT_NO_THROW(verify_program(program, layout))
                  << dump_layout(layout) << dump_program(program, layout);
              ++programs;
            }
          }
        }
      }
    }
  }
  EXPECT_GT(programs, 5000u);
}

TEST(Planner, LeastSlotsVerify) {
  for (const bool unified : {true, false}) {
    for (const UpdateTiming update : {UpdateTiming::next_forward, UpdateTiming::in_backward}) {
      PlanOptions o = roomy_options();
      o.unified = unified;
      o.update = update;
      o.weights = o.optimizer = o.activations = Placement::nvme;
      if (update == UpdateTiming::next_forward) o.gradients = Placement::nvme;
      o.micro_batches = 5;
      o.prefetch_depth = 0;
      o.host_memory = o.device_memory = 0;
      // Raise each budget just to what the refusals ask for: that is the least layout.
      for (int tries = 0; tries < 4; ++tries) {
        try {
          const Layout layout = plan_layout(tiny_model(true), o);
          for (const StepKind& kind : kinds_of(o)) verify_program(plan_step(layout, kind), layout);
          break;
        } catch (const Error& error) {
          ASSERT_EQ(error.code(), ErrorCode::does_not_fit);
          const std::string text = error.what();
          const bool device = text.find("offload.device_memory of") != std::string::npos;
          const size_t set = text.find(": ", text.find("; set offload."));
          ASSERT_NE(set, std::string::npos) << text;
          (device ? o.device_memory : o.host_memory) =
              parse_bytes(text.substr(set + 2, text.find("MiB", set) + 3 - set - 2));
        }
        ASSERT_LT(tries, 3);
      }
    }
  }
}

TEST(Planner, BytesPerParameterAreTheDesigns) {
  for (const bool unified : {true, false}) {
    for (const uint32_t micro_batches : {1u, 4u}) {
      PlanOptions o = roomy_options();
      o.unified = unified;
      o.weights = o.optimizer = o.gradients = Placement::nvme;
      o.activations = Placement::device;
      o.prefetch_depth = 0;
      o.micro_batches = micro_batches;
      const ModelShape model = tiny_model(false);
      const Layout layout = plan_layout(model, o);
      const Program program = plan_step(layout, {true, true, true, false, micro_batches});
      uint64_t blocks = 0, ends = model.layers.front().padded + model.layers.back().padded;
      for (const LayerShape& layer : model.layers) blocks += layer.padded;
      blocks -= ends;
      // 14 + 2 read and 12 + 2 written; the embedding's and the head's weights are used once only.
      EXPECT_EQ(program.lane_bytes(Lane::nvme_read), 16 * blocks + 14 * ends);
      EXPECT_EQ(program.lane_bytes(Lane::nvme_write), 14 * (blocks + ends));
      const Program first = plan_step(layout, {true, true, true, true, micro_batches});
      EXPECT_EQ(first.lane_bytes(Lane::nvme_read), 8 * blocks + 6 * ends);  // moments are zero
    }
  }
}

TEST(Planner, GradientsInRamSaveTheirBytes) {
  PlanOptions o = roomy_options();
  o.weights = o.optimizer = Placement::nvme;
  o.gradients = Placement::host;
  o.activations = Placement::device;
  o.prefetch_depth = 0;
  const ModelShape model = tiny_model(false);
  const Layout layout = plan_layout(model, o);
  const Program program = plan_step(layout, {true, true, true, false, 2});
  const uint64_t ends = model.layers.front().padded + model.layers.back().padded;
  uint64_t total = 0;
  for (const LayerShape& layer : model.layers) total += layer.padded;
  EXPECT_EQ(program.lane_bytes(Lane::nvme_read), 14 * total - 2 * ends);
  EXPECT_EQ(program.lane_bytes(Lane::nvme_write), 12 * total);
}

TEST(Planner, PrefetchedTopBlocksAreNotReadAgain) {
  PlanOptions o = roomy_options();
  o.weights = o.optimizer = Placement::nvme;
  o.gradients = Placement::host;
  const ModelShape model = tiny_model(false, 4);
  uint64_t previous = UINT64_MAX;
  for (uint32_t depth = 0; depth < 4; ++depth) {
    o.prefetch_depth = depth;
    const Layout layout = plan_layout(model, o);
    const uint64_t bytes =
        plan_step(layout, {true, true, true, false, 2}).lane_bytes(Lane::nvme_read);
    if (depth > 0) {
      EXPECT_EQ(bytes, previous - 2 * model.layers[1].padded);
    }
    previous = bytes;
  }
}

TEST(Planner, EqualInputsGiveEqualDumps) {
  PlanOptions o = roomy_options();
  o.weights = Placement::nvme;
  const Layout a = plan_layout(tiny_model(true), o), b = plan_layout(tiny_model(true), o);
  const StepKind kind{true, true, true, false, 2};
  EXPECT_EQ(dump_program(plan_step(a, kind), a), dump_program(plan_step(b, kind), b));
  EXPECT_EQ(dump_layout(a), dump_layout(b));
}

TEST(Planner, AutoKeepsEverythingInMemoryWhenItFits) {
  const Layout layout = plan_layout(tiny_model(true), roomy_options());
  EXPECT_EQ(layout.nvme_bytes, 0u);
}

TEST(Planner, AutoSpillsWhatDoesNotFit) {
  PlanOptions o = roomy_options();
  o.compute_scratch_bytes = 64 * kKiB;
  o.device_memory = 1 * kMiB;
  o.host_memory = 1 * kMiB;
  const Layout layout = plan_layout(tiny_model(true), o);
  EXPECT_GT(layout.nvme_bytes, 0u);
  EXPECT_GT(layout.home_bytes(PageKind::weight, Tier::host) +
                layout.home_bytes(PageKind::weight, Tier::device),
            0u);
  verify_program(plan_step(layout, {true, true, true, false, 2}), layout);
}

TEST(Planner, RefusesWithoutDriveNamingTheSetting) {
  PlanOptions o = roomy_options();
  o.nvme_available = false;
  o.weights = Placement::nvme;
  try {
    plan_layout(tiny_model(true), o);
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("offload.nvme_paths"), std::string::npos);
  }
}

TEST(Verifier, CatchesEveryRemovedDependency) {
  PlanOptions o = roomy_options();
  o.unified = false;
  o.weights = o.optimizer = o.gradients = o.activations = Placement::nvme;
  o.prefetch_depth = 1;
  const Layout layout = plan_layout(tiny_model(true), o);
  const Program program = plan_step(layout, {true, true, true, false, 2});
  size_t caught = 0, pacing = 0;
  for (size_t i = 0; i < program.deps.size(); ++i) {
    Program mutant = program;
    for (Op& op : mutant.ops) {  // drop dependency i by pointing it at its neighbour, or at none
      if (i < op.first_dep || i >= op.first_dep + op.dep_count) continue;
      std::swap(mutant.deps[i], mutant.deps[op.first_dep + op.dep_count - 1]);
      --op.dep_count;
    }
    try {
      verify_program(mutant, layout);
      ++pacing;  // a load gate: about when, not about correctness
    } catch (const Error&) {
      ++caught;
    }
  }
  EXPECT_GT(caught, 100u);
  EXPECT_LT(pacing, caught / 3);
}

TEST(Verifier, CatchesAMisplacedPage) {
  PlanOptions o = roomy_options();
  o.weights = Placement::nvme;
  const Layout layout = plan_layout(tiny_model(true), o);
  Program program = plan_step(layout, {true, true, false, false, 2});
  for (Access& access : program.accesses) {
    if (layout.page(access.page).kind == PageKind::weight && access.mode == AccessMode::write) {
      access.page.value += 1;
      break;
    }
  }
  EXPECT_THROW(verify_program(program, layout), Error);
}

}  // namespace
}  // namespace overspill
