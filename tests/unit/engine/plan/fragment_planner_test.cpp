// Fragments as a pager has them planned, over all devices, tiers and ways of sharing: each does
// what its parts ask for, and leaves what those after it count on.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>
#include <map>
#include <string>

#include "engine/base/error.h"
#include "engine/program/dump.h"
#include "engine/train/parameter_groups.h"
#include "tests/unit/engine/plan/fragment_driver.h"
#include "tests/unit/engine/plan/test_models.h"

namespace overspill {
namespace {

using Parts = std::span<const FragmentPart>;
using test::FragmentDriver;

ModelShape random_model(std::mt19937_64& random) {
  const auto below = [&](size_t n) { return random() % n; };
  ModelShape model = test::tiny_model(false, static_cast<uint32_t>(1 + below(4)));
  switch (below(4)) {
    case 0: apply_parameter_groups(model, {{"model.layers.[02].mlp", "model.norm"}}, {}); break;
    case 1: apply_parameter_groups(model, {{"model.layers.0.input_layernorm"}}, {}); break;
    default: break;  // all of it trains
  }
  return model;
}

/// A pager's options of any kind; the ranks' homes may differ.
PlanOptions random_options(const ModelShape& model, std::mt19937_64& random) {
  const auto below = [&](size_t n) { return static_cast<uint32_t>(random() % n); };
  const auto tiers = [&] {
    const std::vector<Tier> all = {Tier::device, Tier::host, Tier::nvme};
    const uint32_t kind = below(4);  // all layers alike, or each anywhere
    std::vector<Tier> chosen;
    for (size_t l = 0; l < model.layers.size(); ++l)
      chosen.push_back(all[kind < 3 ? kind : below(3)]);
    return chosen;
  };
  PlanOptions o = test::roomy_options();
  o.micro_batches = 0;
  o.compute_scratch_bytes = 0;
  o.homes = Homes{tiers(), tiers(), tiers(), std::vector(model.layers.size(), Tier::host)};
  o.unified = below(3) == 0;
  o.streams = !o.unified && below(2) == 0;
  o.update = below(2) == 0 ? UpdateTiming::next_forward : UpdateTiming::in_backward;
  o.precision = below(2) == 0 ? Precision::bf16 : Precision::float32;
  o.optimizer_settings.kind = std::array{OptimizerKind::adamw, OptimizerKind::lion,
                                         OptimizerKind::sgd, OptimizerKind::adafactor}[below(4)];
  o.prefetch_depth = below(4);
  o.held_layers = 1 + below(2) + (*o.prefetch_depth == 0 ? 1 : 0);
  o.chunk_parameters = below(2) == 0 ? 4096 : 12288;
  if (below(3) == 0) o.stage_slots = 2, o.record_slots = 1;
  switch (below(5)) {
    case 0: o.replicas = 2; break;                        // ZeRO-0
    case 1: o.ranks = 2, o.shard_weights = false; break;  // ZeRO-1 and 2
    case 2: o.ranks = 2; break;                           // ZeRO-3
    case 3: o.ranks = 3, o.replicas = 2; break;           // hybrid
    default: break;
  }
  o.rank = below(o.ranks);
  const uint32_t paged = below(3);
  o.paged_sums.resize(model.layers.size());
  for (size_t l = 0; l < model.layers.size(); ++l) {
    o.paged_sums[l] = paged > 0 && (paged > 1 || below(2) == 0) && model.layers[l].trainable();
  }
  return o;
}

std::string describe(const PlanOptions& o) {
  return fmt::format(
      "unified {} streams {} in_backward {} float32 {} depth {} ranks {} rank {} "
      "shard_weights {} replicas {}\n",
      o.unified, o.streams, o.update == UpdateTiming::in_backward,
      o.precision == Precision::float32, *o.prefetch_depth, o.ranks, o.rank, o.shard_weights,
      o.replicas);
}

std::string describe(Parts parts) {
  std::string text;
  for (const FragmentPart& p : parts) {
    constexpr std::array names = {"bring", "update", "finish_gradient", "store_sums", "load_sums"};
    text += fmt::format("{} L{} place {} present {} sums {} updates {}\n",
                        names[static_cast<size_t>(p.kind)], p.layer, p.place.slot.value,
                        p.place.present, p.sums.value, p.updates);
  }
  return text;
}

/// What a fragment has that could go wrong.
void count_situations(Parts parts, std::map<std::string, size_t>& seen) {
  constexpr std::array names = {"bring", "update", "finish", "store", "load"};
  ++seen[fmt::format("{} parts", std::min<size_t>(parts.size(), 5))];
  for (size_t i = 0; i < parts.size(); ++i) {
    const FragmentPart& part = parts[i];
    const char* name = names[static_cast<size_t>(part.kind)];
    const char* where = part.place.slot == SlotId{} ? ""
                        : part.place.present        ? " of what is present"
                                                    : " in a free place";
    ++seen[fmt::format("{}{}{}", name, where, part.updates ? " with an update" : "")];
    for (const FragmentPart& before : parts.first(i)) {
      const char* first = names[static_cast<size_t>(before.kind)];
      if (before.layer == part.layer) ++seen[fmt::format("{} and {} of a layer", first, name)];
      const bool same = part.place.slot != SlotId{} && before.place.slot == part.place.slot;
      if (same && before.layer != part.layer) ++seen["two layers in a place"];
    }
  }
}

TEST(FragmentPlanner, EveryFragmentVerifies) {
  std::map<std::string, size_t> seen;
  size_t fragments = 0, ops = 0;
  for (uint64_t seed = 0; seed < 1500; ++seed) {
    std::mt19937_64 random(seed);
    const ModelShape model = random_model(random);
    const PlanOptions options = random_options(model, random);
    const Layout layout = plan_layout(model, options);
    FragmentDriver driver(layout, seed,
                          [&](const Program& program, Parts parts, FragmentVerifier& verifier) {
                            count_situations(parts, seen);
                            ++fragments;
                            ops += program.ops.size();
                            try {
                              verifier.verify(program, parts);
                            } catch (const Error& error) {
                              ADD_FAILURE() << error.what() << "\nseed " << seed << ": "
                                            << describe(options) << describe(parts)
                                            << dump_layout(layout) << dump_program(program, layout);
                              throw;
                            }
                          });
    ASSERT_NO_THROW({
      for (int step = 0; step < 6; ++step) driver.step();
      driver.flush();
    }) << "seed "
       << seed;
  }
  EXPECT_GT(fragments, 50000u);
  EXPECT_GT(ops, 500000u);
  for (const char* situation : {"1 parts",
                                "2 parts",
                                "5 parts",
                                "bring in a free place",
                                "bring with an update",
                                "bring in a free place with an update",
                                "bring of what is present with an update",
                                "update with an update",
                                "update in a free place with an update",
                                "update of what is present with an update",
                                "finish",
                                "finish in a free place",
                                "finish of what is present",
                                "store",
                                "load",
                                "update and finish of a layer",
                                "update and store of a layer",
                                "bring and finish of a layer",
                                "finish and bring of a layer",
                                "two layers in a place"}) {
    EXPECT_GT(seen[situation], 100u) << situation;
  }
}

/// The collectives of fragments, in the order of their lane.
std::vector<std::string> collectives(const ModelShape& model, PlanOptions options, uint32_t rank,
                                     uint64_t seed) {
  options.rank = rank;
  const Layout layout = plan_layout(model, options);
  std::vector<std::string> found;
  FragmentDriver driver(layout, seed, [&](const Program& program, Parts parts, auto& verifier) {
    verifier.verify(program, parts);
    for (const Op& op : program.ops) {
      if (op.lane != Lane::collective) continue;
      found.push_back(fmt::format("{} L{} work {}", op_name(op.kind), op.layer, op.work));
    }
  });
  for (int step = 0; step < 3; ++step) driver.step();
  return found;
}

TEST(FragmentPlanner, RanksDoTheSameTogether) {
  for (uint64_t seed = 0; seed < 100; ++seed) {
    std::mt19937_64 random(seed);
    const ModelShape model = random_model(random);
    PlanOptions options = random_options(model, random);
    options.ranks = 2;
    const std::vector<std::string> first = collectives(model, options, 0, seed);
    EXPECT_GT(first.size(), 3u) << "seed " << seed;
    EXPECT_EQ(first, collectives(model, options, 1, seed)) << "seed " << seed;
  }
}

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
