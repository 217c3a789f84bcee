// Budgets are checked on the run's own problem, times come from coarse copies of it.
#include "engine/forecast/placement_trial.h"

#include <algorithm>
#include <cmath>

#include "engine/base/units.h"
#include "engine/forecast/forecast.h"
#include "engine/plan/planner.h"
#include "engine/run/simulator.h"

namespace overspill {
namespace {

/// Blocks are cut into whole shares, so that no small chunk is left over.
uint64_t coarse_chunk(const ModelShape& model, const PlanOptions& options, uint64_t chunks) {
  const uint64_t of_block = std::max<uint64_t>(2, chunks / model.layers.size());
  const uint64_t share = ceil_div(shard_parameters(model.layers[1], options.ranks), of_block);
  return std::max(round_up(share, kParameterAlignment), choose_chunk_parameters(model, options));
}

uint32_t coarse_micro_batches(const ModelShape& model, const PlanOptions& options,
                              const Grain& grain) {
  const uint64_t most = std::max<uint64_t>(2, grain.micro_batches / model.layers.size());
  return static_cast<uint32_t>(std::min<uint64_t>(most, options.micro_batches));
}

/// The same tokens in fewer micro-batches.
PlanOptions merge_micro_batches(PlanOptions options, uint32_t most) {
  if (options.micro_batches <= most) return options;
  options.micro_batch_tokens =
      ceil_div(options.micro_batch_tokens * options.micro_batches, uint64_t{most});
  options.micro_batches = most;
  return options;
}

/// The same bytes in fewer and larger slots.
PlanOptions merge_slots(PlanOptions options, double coarseness) {
  const auto merge = [&](std::optional<uint32_t>& slots) {
    if (slots) slots = static_cast<uint32_t>(std::ceil(*slots / coarseness));
  };
  merge(options.record_slots);
  merge(options.stage_slots);
  return options;
}

/// A coarse op has the latency of all those that it stands for.
CostModel coarse_costs(const ModelShape& model, const PlanOptions& options,
                       const HardwareProfile& profile, double chunks, double micro_batches) {
  Layout sizes;
  sizes.model = model;
  sizes.options = options;
  CostModel costs = cost_model(profile, sizes, options.world());
  const auto raise = [&](std::initializer_list<OpKind> kinds, double factor) {
    for (const OpKind kind : kinds) {
      for (const LayerKind layer : {LayerKind::embedding, LayerKind::block, LayerKind::head}) {
        costs.at(kind, layer).latency_seconds *= factor;
      }
    }
  };
  using enum OpKind;
  raise({read, write, copy_to_device, copy_to_host, update, export_gradient}, chunks);
  raise({forward, backward, loss, score}, micro_batches);
  costs.device_update.latency_seconds *= chunks;
  return costs;
}

/// Working copies of activations have room for as many tokens as in the run, not as many pages.
void shrink_activation_slots(SlotPlan& slots, uint32_t ahead, double merged) {
  const uint32_t spare = ahead - static_cast<uint32_t>(std::ceil(ahead / merged));
  if (slots.activation_slots > ahead) {
    slots.activation_slots -= spare;
    slots.device_bytes -= spare * slots.activation_bytes;
  }
  if (slots.activation_stages == ahead) {
    slots.activation_stages -= spare;
    slots.host_bytes -= spare * slots.activation_bytes;
  }
}

}  // namespace

PlacementView::PlacementView(const ModelShape& model, const PlanOptions& options,
                             uint64_t chunk_parameters)
    : options_(options),
      table_(cut_chunks(model, chunk_parameters, options.optimizer_settings, options.rank_of())),
      problem_(model, options_, table_, 1, chunk_parameters) {}

PlacementProblem& PlacementView::problem_of(const Placed& placed) {
  options_.update_twice = placed.twice;
  problem_.prefetch_depth = placed.depth;
  return problem_;
}

Placed PlacementView::greedy(uint32_t depth) {
  problem_.prefetch_depth = depth;
  bool generous = true;
  return {choose_homes(problem_, generous), {}, depth};
}

std::optional<bool> PlacementView::fits(const Placed& placed) {
  return fits_generously(problem_of(placed), placed.homes);
}

void PlacementView::drop_useless(Placed& placed) {
  const PlacementProblem& problem = problem_of(placed);
  for (uint32_t l = 0; l < placed.twice.size(); ++l) {
    placed.twice[l] = updates_twice(problem.model, problem.options, l, placed.homes.weights[l],
                                    placed.homes.optimizer[l]);
  }
}

double PlacementView::state_bytes() const {
  uint64_t bytes = 0;
  for (uint32_t l = 0; l < problem_.model.layers.size(); ++l) {
    bytes += problem_.weight_bytes(l) + problem_.optimizer_bytes[l] + problem_.gradient_bytes[l];
  }
  return static_cast<double>(bytes);
}

PlacementPredictor::PlacementPredictor(const ModelShape& model, const PlanOptions& options,
                                       const HardwareProfile& profile, const Grain& grain)
    : micro_batches_(coarse_micro_batches(model, options, grain)),
      coarseness_(static_cast<double>(coarse_chunk(model, options, grain.chunks)) /
                  static_cast<double>(choose_chunk_parameters(model, options))),
      view_(model, merge_slots(merge_micro_batches(options, micro_batches_), coarseness_),
            coarse_chunk(model, options, grain.chunks)),
      merged_(static_cast<double>(options.micro_batches) / micro_batches_),
      costs_(coarse_costs(model, options, profile, coarseness_, merged_)) {}

Prediction PlacementPredictor::predict(const Placed& placed, bool generous) {
  const PlacementProblem& problem = view_.problem_of(placed);
  SlotPlan slots = plan_slots(problem, placed.homes, generous);
  shrink_activation_slots(slots, 2 + placed.depth, merged_);
  const Layout layout = build_layout(problem, placed.homes, slots);
  const Program program = plan_step(layout, steady_step(problem.options));
  Prediction prediction;
  prediction.seconds = static_cast<double>(simulate(program, costs_).end_ns()) * 1e-9;
  prediction.written = program.lane_bytes(Lane::nvme_write);
  prediction.read = program.lane_bytes(Lane::nvme_read);
  prediction.ops = program.ops.size();
  for (const Lane lane : {Lane::nvme_read, Lane::nvme_write, Lane::h2d, Lane::d2h}) {
    prediction.moved += program.lane_bytes(lane);
  }
  return prediction;
}

}  // namespace overspill
