// Programs of partly frozen models: every placement verifies, and frozen chunks have no state, no
// gradient and no traffic but their weights on the way to compute.
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

using Patterns = std::vector<std::string>;
using test::roomy_options;

ModelShape frozen_model(bool tied, const Patterns& unfrozen) {
  ModelShape model = test::tiny_model(tied);
  apply_parameter_groups(model, unfrozen, {});
  return model;
}

/// What trains, from everything but a norm to a few matrices in the middle.
const std::vector<Patterns> kCases = {{"model.layers.[12]"},
                                      {"model.layers.1.mlp.down_proj", "model.norm"},
                                      {"model.embed_tokens"},
                                      {"model.layers.[02].self_attn", "model.embed_tokens"},
                                      {"model.norm"},
                                      {"model.layers.2.input_layernorm"},
                                      {"model.embed_tokens", "model.layers", "model.norm"}};

std::vector<StepKind> kinds_of(const PlanOptions& o) {
  const uint32_t mb = o.micro_batches;
  if (o.update == UpdateTiming::in_backward) {
    return {{true, true, false, true, mb}, {true, true, false, false, mb}};
  }
  return {{true, true, false, false, mb},
          {true, true, true, true, mb},
          {true, true, true, false, mb},
          {true, false, false, false, mb},
          {false, false, true, false, mb}};
}

bool is_frozen(const Layout& layout, PageId id) {
  const Page& page = layout.page(id);
  const bool of_chunk = page.kind == PageKind::weight || page.kind == PageKind::optimizer ||
                        page.kind == PageKind::gradient;
  return of_chunk && !layout.chunk(page.layer, page.index).trainable();
}

/// Frozen pages are only loaded and read.
void expect_only_read(const Program& program, const Layout& layout) {
  for (const Op& op : program.ops) {
    for (const Access& access : program.accesses_of(op)) {
      for (uint32_t i = 0; i < access.page_count; ++i) {
        const PageId id{access.page.value + i};
        if (!is_frozen(layout, id)) continue;
        const std::string name = page_name(layout.page(id));
        ASSERT_EQ(layout.page(id).kind, PageKind::weight) << name;
        ASSERT_NE(op.kind, OpKind::update) << name;
        ASSERT_NE(op.kind, OpKind::write) << name;
        ASSERT_NE(op.kind, OpKind::copy_to_host) << name;
      }
    }
  }
}

TEST(Frozen, EveryPlacementVerifiesAndOnlyReadsWhatIsFrozen) {
  constexpr Placement tiers[] = {Placement::device, Placement::host, Placement::nvme};
  size_t programs = 0;
  for (const Patterns& unfrozen : kCases) {
    for (uint32_t n = 0; n < 81 * 8; n += 5) {
      PlanOptions o = roomy_options();
      o.weights = tiers[n % 3];
      o.optimizer = tiers[n / 3 % 3];
      o.activations = tiers[n / 9 % 3];
      o.update = n / 81 % 2 == 0 ? UpdateTiming::next_forward : UpdateTiming::in_backward;
      if (o.update == UpdateTiming::next_forward) o.gradients = tiers[n / 27 % 3];
      o.unified = n / 162 % 2 == 0;
      o.precision = n / 324 % 2 == 0 ? Precision::bf16 : Precision::float32;
      o.prefetch_depth = n % 4;
      o.micro_batches = 1 + n % 3;
      o.chunk_parameters = n % 2 == 0 ? 4096 : 12288;
      const Layout layout = plan_layout(frozen_model(n % 7 < 3, unfrozen), o);
      for (const StepKind& kind : kinds_of(o)) {
        const Program program = plan_step(layout, kind);
        ASSERT_NO_THROW(verify_program(program, layout))
            << dump_layout(layout) << dump_program(program, layout);
        expect_only_read(program, layout);
        ++programs;
      }
    }
  }
  EXPECT_GT(programs, 3000u);
}

TEST(Frozen, ChunksHaveNeitherStateNorGradient) {
  const ModelShape model = frozen_model(false, {"model.layers.1.mlp.(up|down)_proj"});
  PlanOptions o = roomy_options();
  o.chunk_parameters = 4096;
  for (const UpdateTiming update : {UpdateTiming::next_forward, UpdateTiming::in_backward}) {
    o.update = update;
    const Layout layout = plan_layout(model, o);
    std::set<std::string> updated;
    uint64_t elements = 0;
    for (uint32_t l = 0; l < model.layers.size(); ++l) {
      for (uint32_t c = 0; c < layout.chunk_count(l); ++c) {
        const Chunk& chunk = layout.chunk(l, c);
        const bool trains = chunk.trainable();
        EXPECT_EQ(layout.page(layout.optimizer(l, c)).bytes > 0, trains);
        EXPECT_EQ(layout.page(layout.gradient(l, c)).bytes > 0, trains);
        EXPECT_EQ(layout.state(chunk).bytes > 0, trains);
        for (const UpdateRun& run : layout.runs(chunk)) {
          elements += run.end - run.begin;
          EXPECT_EQ(l, 2u);
        }
      }
    }
    EXPECT_EQ(elements, 2u * 64 * 160);
  }
}

std::vector<uint64_t> op_counts(const Program& program) {
  std::vector<uint64_t> counts(11);
  for (const Op& op : program.ops) ++counts[static_cast<size_t>(op.kind)];
  return counts;
}
uint64_t count(const Program& program, OpKind kind) {
  return op_counts(program)[static_cast<size_t>(kind)];
}
uint64_t work(const Program& program, OpKind kind) {
  uint64_t total = 0;
  for (const Op& op : program.ops) total += op.kind == kind ? op.work : 0;
  return total;
}

TEST(Frozen, TheBackwardEndsAtTheLowestTrainableLayer) {
  PlanOptions o = roomy_options();
  const StepKind kind{true, true, false, false, 2};
  const auto backwards = [&](bool tied, const Patterns& unfrozen) {
    return count(plan_step(plan_layout(frozen_model(tied, unfrozen), o), kind), OpKind::backward);
  };
  EXPECT_EQ(backwards(false, {"model.norm"}), 0u);
  EXPECT_EQ(backwards(false, {"model.layers.2"}), 2u);
  EXPECT_EQ(backwards(false, {"model.layers.[12]"}), 4u);
  EXPECT_EQ(backwards(false, {"model.layers.0.mlp"}), 6u) << "through frozen layers";
  EXPECT_EQ(backwards(true, {"model.embed"}), 8u);
}

TEST(Frozen, OpsAndTheirWorkAreOfWhatTrains) {
  PlanOptions o = roomy_options();
  o.chunk_parameters = 4096;
  const ModelShape model = frozen_model(false, {"model.layers.1.mlp.down_proj"});
  const Layout layout = plan_layout(model, o);
  const Program program = plan_step(layout, {true, true, true, false, 2});
  const LayerTensor& down = model.layers[2].tensors[kDown];
  const uint64_t chunks = (down.offset + down.elements - 1) / 4096 - down.offset / 4096 + 1;
  EXPECT_EQ(count(program, OpKind::reduce_gradient), 1u);
  EXPECT_EQ(count(program, OpKind::export_gradient), chunks);
  EXPECT_EQ(count(program, OpKind::update), chunks);
  EXPECT_EQ(work(program, OpKind::loss), 2 * 2 * forward_flops(model, model.head(), 32, 16))
      << "no gradient of the output projection";
  const uint64_t block = forward_flops(model, 2, 32, 16);
  const uint64_t frozen = model.layers[2].parameters - down.elements;
  EXPECT_EQ(work(program, OpKind::backward),
            2 * (3 * block - 2 * 32 * frozen + 3 * block - 2 * 32 * model.layers[3].parameters));
}

TEST(Frozen, BytesAreOfWhatTrains) {
  for (const bool unified : {true, false}) {
    PlanOptions o = roomy_options();
    o.unified = unified;
    o.weights = o.optimizer = o.gradients = Placement::nvme;
    o.activations = Placement::device;
    o.prefetch_depth = 0;
    const ModelShape model = frozen_model(false, {"model.layers.1."});
    const Layout layout = plan_layout(model, o);
    uint64_t all = 0;
    for (const LayerShape& layer : model.layers) all += layer.padded;
    const uint64_t trained = model.layers[2].padded;
    const Program program = plan_step(layout, {true, true, true, false, 2});
    // Weights once, those of the layers of the backward twice; state and gradient of one layer.
    EXPECT_EQ(program.lane_bytes(Lane::nvme_read),
              2 * all + 2 * (trained + model.layers[3].padded) + 12 * trained);
    EXPECT_EQ(program.lane_bytes(Lane::nvme_write), 14 * trained);
    EXPECT_EQ(layout.home_bytes(PageKind::optimizer, Tier::nvme), 10 * trained);
    EXPECT_EQ(layout.home_bytes(PageKind::gradient, Tier::nvme), 2 * trained);
  }
}

TEST(Frozen, ActivationsBelowTheBackwardAreNotSpilled) {
  PlanOptions o = roomy_options();
  o.activations = Placement::nvme;
  o.micro_batches = 8;
  const auto written = [&](const Patterns& unfrozen) {
    const Layout layout = plan_layout(frozen_model(false, unfrozen), o);
    std::set<uint32_t> layers;
    const Program program = plan_step(layout, {true, true, false, false, 8});
    for (const Op& op : program.ops) {
      if (op.kind != OpKind::write) continue;
      for (const Access& access : program.accesses_of(op)) {
        if (layout.page(access.page).kind == PageKind::activation) layers.insert(op.layer);
      }
    }
    return layers;
  };
  EXPECT_EQ(written({"model.layers"}), (std::set<uint32_t>{1, 2, 3}));
  EXPECT_EQ(written({"model.layers.1"}), (std::set<uint32_t>{2, 3}));
  EXPECT_EQ(written({"model.norm"}), (std::set<uint32_t>{}));
}

TEST(Frozen, SumsAreForLayersThatTrain) {
  const PlanOptions o = roomy_options();
  const ModelShape model = frozen_model(true, {"model.norm"});
  const Layout layout = plan_layout(model, o);
  EXPECT_EQ(layout.tied_gradient, SlotId{});
  EXPECT_EQ(layout.slot(layout.gradient_ring[0]).bytes, model.layers.back().padded * 4);
}

TEST(FrozenVerifier, CatchesFrozenPagesThatAreWrittenAndUpdatesThatAreMissing) {
  PlanOptions o = roomy_options();
  o.weights = o.optimizer = o.gradients = Placement::nvme;
  const Patterns unfrozen = {"model.layers.1"};
  const Layout all = plan_layout(test::tiny_model(false), o);
  Layout claims = all;  // a planner that does not know what is frozen
  claims.model = frozen_model(false, unfrozen);
  const StepKind kind{true, true, true, false, 2};
  EXPECT_THROW(verify_program(plan_step(all, kind), claims), Error);

  const Layout layout = plan_layout(frozen_model(false, unfrozen), o);
  Program program = plan_step(layout, kind);
  verify_program(program, layout);
  for (Op& op : program.ops) {  // the same accesses, but no update any more
    if (op.kind == OpKind::update) op.kind = OpKind::copy_to_host;
  }
  EXPECT_THROW(verify_program(program, layout), Error);
}

TEST(FrozenVerifier, CatchesWeightsFromBeforeTheUpdate) {
  PlanOptions o = roomy_options();
  o.weights = o.optimizer = o.gradients = Placement::nvme;
  const Layout layout = plan_layout(test::tiny_model(false), o);
  Program program = plan_step(layout, {true, true, true, false, 2});
  // Without the write, home keeps the old weights, which the backward then loads.
  const auto writes_weights = [&](const Op& op) {
    return op.kind == OpKind::write &&
           layout.page(program.accesses_of(op)[0].page).kind == PageKind::weight;
  };
  const auto found = std::ranges::find_if(program.ops, writes_weights);
  ASSERT_NE(found, program.ops.end());
  found->access_count = 0;
  EXPECT_THROW(verify_program(program, layout), Error);
}

}  // namespace
}  // namespace overspill
