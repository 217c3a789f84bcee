// Which tier each layer's state lives in, and how much memory that takes. Internal to engine/plan.
#pragma once

#include <vector>

#include "engine/plan/layout.h"

namespace overspill {

/// A home tier per layer for each kind. activations[0] is the activation gradients' home.
struct Homes {
  std::vector<Tier> weights, optimizer, gradients, activations;
};

/// How many slots of each kind a layout has, and their sizes in bytes.
struct SlotPlan {
  uint32_t weight_ring = 0, gradient_ring = 0, activation_slots = 0, device_stages = 0;
  uint32_t stages = 0, records = 0, activation_stages = 0;
  uint64_t ring_bytes = 0, gradient_sum_bytes = 0, tied_gradient_bytes = 0, activation_bytes = 0;
  uint64_t stage_bytes = 0, record_bytes = 0, factored_bytes = 0;
  uint64_t device_bytes = 0, host_bytes = 0, nvme_bytes = 0;  ///< homes included
};

/// The sizes placement works with, derived once.
struct PlacementProblem {
  PlacementProblem(const ModelShape& model, const PlanOptions& options, const ChunkTable& table,
                   uint32_t prefetch_depth, uint64_t chunk_parameters);

  const ModelShape& model;
  const PlanOptions& options;
  const ChunkTable& table;
  uint32_t prefetch_depth;
  uint64_t chunk_parameters;
  std::vector<uint64_t> optimizer_bytes;  ///< per layer
  std::vector<uint64_t> gradient_bytes;   ///< per layer; 0 when updates run in the backward
  uint64_t record_bytes = 0;              ///< of the largest optimizer page

  /// Of this rank's part of a layer, and of all of it.
  uint64_t weight_bytes(uint32_t layer) const;
  uint64_t whole_weight_bytes(uint32_t layer) const;
  uint64_t gradient_sum_bytes(uint32_t layer) const;
  /// All micro-batches of a layer's input.
  uint64_t activation_bytes() const;
  uint64_t activation_page_bytes() const;
  uint32_t max_chunks() const;
  bool stores_gradients() const { return options.update == UpdateTiming::next_forward; }
};

/// Slots and totals that the homes need; `generous` asks for pipelining room, else for the least.
SlotPlan plan_slots(const PlacementProblem& problem, const Homes& homes, bool generous);

/// Homes within the budgets, or Error(does_not_fit).
Homes choose_homes(const PlacementProblem& problem, bool& generous);

}  // namespace overspill
