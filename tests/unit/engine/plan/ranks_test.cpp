// Programs of one rank of several: each rank owns its part of every layer's state; weights are
// gathered before compute or behind updates, gradients reduced and scattered after the backward,
// once per layer and pass.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>

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

PlanOptions rank_options(uint32_t rank, uint32_t ranks) {
  PlanOptions o = roomy_options();
  o.rank = rank;
  o.ranks = ranks;
  o.weights = o.optimizer = o.gradients = Placement::nvme;
  o.activations = Placement::device;
  o.chunk_parameters = 4096;
  return o;
}

uint64_t work(const Program& program, OpKind kind) {
  uint64_t total = 0;
  for (const Op& op : program.ops) total += op.kind == kind ? op.work : 0;
  return total;
}

/// The collectives of a Program, in the order of their lane.
std::vector<std::string> collectives(const Program& program) {
  std::vector<std::string> found;
  for (const Op& op : program.ops) {
    if (op.lane != Lane::collective) continue;
    found.push_back(fmt::format("{} L{} work {}", op_name(op.kind), op.layer, op.work));
  }
  return found;
}

TEST(Ranks, EveryPlacementVerifies) {
  constexpr Placement tiers[] = {Placement::device, Placement::host, Placement::nvme};
  for (uint32_t n = 0; n < 81 * 24; n += 5) {
    ModelShape model = tiny_model(n % 7 < 3);
    if (n % 4 == 1) apply_parameter_groups(model, {{"model.layers.[02].mlp", "model.norm"}}, {});
    const uint32_t ranks = std::array{2u, 3u, 4u, 7u}[n % 4];
    PlanOptions o = rank_options(n / 3 % ranks, ranks);
    o.weights = tiers[n % 3];
    o.optimizer = tiers[n / 3 % 3];
    o.activations = tiers[n / 9 % 3];
    o.update = n / 81 % 2 == 0 ? UpdateTiming::next_forward : UpdateTiming::in_backward;
    o.gradients = Placement::automatic;
    if (o.update == UpdateTiming::next_forward) {
      o.gradients = tiers[n / 27 % 3];
      o.update_twice.assign(model.layers.size(), n % 2 == 0);
    }
    o.unified = n / 162 % 2 == 0;
    o.precision = n / 324 % 2 == 0 ? Precision::bf16 : Precision::float32;
    o.prefetch_depth = n / 2 % 4;
    o.micro_batches = 1 + n % 3;
    o.shard_weights = n / 5 % 3 > 0;
    if (n / 15 % 3 == 0) o.replicas = 2;
    if (n / 15 % 6 == 0) o.ranks = 1, o.rank = 0;
    const Layout layout = plan_layout(model, o);
    std::vector<StepKind> kinds = {{true, true, false, true, 1}, {true, false, false, false, 1}};
    if (o.update == UpdateTiming::next_forward) {
      kinds.push_back({true, true, true, false, o.micro_batches});
      kinds.push_back({false, false, true, true, 1});
    }
    for (const StepKind& kind : kinds) {
      const Program program = plan_step(layout, kind);
      ASSERT_NO_THROW(verify_program(program, layout))
          << dump_layout(layout) << dump_program(program, layout);
    }
  }
}

TEST(Ranks, PartsCoverEveryLayerOnce) {
  const ModelShape model = tiny_model(false);
  for (const uint32_t ranks : {1u, 2u, 3u, 5u}) {
    for (uint32_t l = 0; l < model.layers.size(); ++l) {
      uint64_t next = 0, trained = 0;
      for (uint32_t rank = 0; rank < ranks; ++rank) {
        const Layout layout = plan_layout(model, rank_options(rank, ranks));
        trained += layout.trained_parameters(l);
        for (uint32_t c = 0; c < layout.chunk_count(l); ++c) {
          EXPECT_EQ(layout.chunk(l, c).begin, next);
          next += layout.chunk(l, c).parameters;
        }
        EXPECT_EQ(layout.whole(l), ranks * layout.shard(l));
        EXPECT_GE(layout.whole(l), model.layers[l].padded);
      }
      EXPECT_EQ(next, ranks * shard_parameters(model.layers[l], ranks));
      EXPECT_EQ(trained, model.layers[l].parameters) << "each parameter has one owner";
    }
  }
}

TEST(Ranks, OneRankIsTheProgramWithoutCollectives) {
  const Layout layout = plan_layout(tiny_model(false), rank_options(0, 1));
  EXPECT_TRUE(collectives(plan_step(layout, kSteady)).empty());
}

TEST(Ranks, CollectivesAreOncePerLayerAndPassWhateverTheAccumulation) {
  const ModelShape model = tiny_model(false);
  PlanOptions o = rank_options(1, 4);
  o.prefetch_depth = 0;
  std::vector<std::string> reference;
  for (const uint32_t micro_batches : {1u, 2u, 8u}) {
    o.micro_batches = micro_batches;
    const Layout layout = plan_layout(model, o);
    const Program program = plan_step(layout, {true, true, true, false, micro_batches});
    uint64_t all = 0, blocks = 0;
    for (uint32_t l = 0; l < model.layers.size(); ++l) {
      all += layout.shard(l);
      if (l > 0 && l < model.head()) blocks += layout.shard(l);
    }
    // Three quarters of a layer come from, or go to, the others: bf16 both ways.
    EXPECT_EQ(work(program, OpKind::all_gather), 3 * 2 * (all + blocks));
    EXPECT_EQ(work(program, OpKind::reduce_scatter), 3 * 2 * all);
    EXPECT_EQ(program.lane_bytes(Lane::nvme_read), 14 * all + 2 * blocks);
    EXPECT_EQ(program.lane_bytes(Lane::nvme_write), 14 * all);
    if (reference.empty()) reference = collectives(program);
    EXPECT_EQ(collectives(program), reference);
  }
}

/// Collectives meet: every rank has the same ones in the same order, wherever its state lives.
TEST(Ranks, AllRanksHaveTheSameCollectives) {
  for (const bool tied : {false, true}) {
    ModelShape model = tiny_model(tied);
    apply_parameter_groups(model, {{"model.embed", "model.layers.1.input_layernorm"}}, {});
    std::vector<std::string> reference;
    for (uint32_t rank = 0; rank < 4; ++rank) {
      PlanOptions o = rank_options(rank, 4);
      if (rank == 2) o.weights = o.optimizer = Placement::host;
      const Program program = plan_step(plan_layout(model, o), kSteady);
      if (reference.empty()) reference = collectives(program);
      EXPECT_EQ(collectives(program), reference) << rank;
    }
    EXPECT_GT(reference.size(), 8u);
  }
}

/// With depth 1 a layer is gathered beside the backward of the layer above it.
TEST(Ranks, GathersRunUnderTheBackwardOfTheLayerAbove) {
  for (const UpdateTiming update : {UpdateTiming::next_forward, UpdateTiming::in_backward}) {
    PlanOptions o = rank_options(0, 2);
    o.update = update;
    if (update == UpdateTiming::in_backward) o.gradients = Placement::automatic;
    o.prefetch_depth = 1;
    const ModelShape model = tiny_model(false, 6);
    const Layout layout = plan_layout(model, o);
    const Program program = plan_step(layout, {true, true, false, false, 2});
    const HappensBefore order(program);
    std::vector<OpId> backward(model.layers.size());
    for (uint32_t i = 0; i < program.ops.size(); ++i) {
      if (program.ops[i].kind == OpKind::backward) backward[program.ops[i].layer] = OpId{i};
    }
    std::vector<uint32_t> gathers(model.layers.size());
    size_t beside = 0;
    for (uint32_t i = 0; i < program.ops.size(); ++i) {
      const Op& op = program.ops[i];
      if (op.kind != OpKind::all_gather || ++gathers[op.layer] < 2) continue;
      EXPECT_FALSE(order.ordered(backward[op.layer + 1], OpId{i})) << op.layer;
      ++beside;
    }
    EXPECT_EQ(beside, 5u) << "the top block is still there";
  }
}

TEST(Ranks, MemoryHoldsWholeLayersAndHomesHoldParts) {
  const ModelShape model = tiny_model(false);
  const Layout one = plan_layout(model, rank_options(0, 1));
  const Layout part = plan_layout(model, rank_options(3, 4));
  EXPECT_EQ(part.slot(part.gradient_ring[0]).bytes, part.whole(1) * 4);
  EXPECT_EQ(part.slot(part.weight_ring[0]).bytes, part.whole(1) * 2);
  EXPECT_LE(part.nvme_bytes, one.nvme_bytes / 4 + 14 * 4096 * model.layers.size());
  EXPECT_NE(dump_layout(part).find("rank 3 of 4"), std::string::npos);
}

/// Llama 3.1 405B on 4 ranks.
TEST(Ranks, AVeryLargeModelIsPlanned) {
  ModelConfig c;
  c.hidden_size = 16384;
  c.intermediate_size = 53248;
  c.num_hidden_layers = 126;
  c.num_attention_heads = 128;
  c.num_key_value_heads = 8;
  c.head_dim = 128;
  c.vocab_size = 128256;
  c.max_position_embeddings = 131072;
  const ModelShape model = llama_layers(c);
  PlanOptions o;
  o.micro_batches = 8;
  o.micro_batch_tokens = o.sequence_len = 4096;
  o.compute_scratch_bytes = 8 * kGiB;
  o.unified = false;
  o.device_memory = 80 * kGiB;
  o.host_memory = 256 * kGiB;
  o.nvme_available = true;
  o.ranks = 4;
  o.rank = 1;
  const Layout layout = plan_layout(model, o);
  const Program program = plan_step(layout, {true, true, true, false, 8});
  verify_program(program, layout);
  EXPECT_GT(layout.nvme_bytes, 500 * kGiB);
  EXPECT_GT(program.ops.size(), 100000u);
}

}  // namespace
}  // namespace overspill
