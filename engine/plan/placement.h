// Which tier each layer's state lives in, and how much memory that takes: what plan_layout and the
// search for placements (engine/forecast/placement_search.h) are made of.
#pragma once

#include <array>
#include <optional>
#include <vector>

#include "engine/plan/layout.h"

namespace overspill {

/// A kind of page whose homes are chosen.
struct PlacedKind {
  std::vector<Tier> Homes::*homes;
  Placement PlanOptions::*placement;
  const char* key;
};
inline constexpr std::array<PlacedKind, 4> kPlacedKinds = {
    {{&Homes::weights, &PlanOptions::weights, "weights"},
     {&Homes::gradients, &PlanOptions::gradients, "gradients"},
     {&Homes::optimizer, &PlanOptions::optimizer, "optimizer"},
     {&Homes::activations, &PlanOptions::activations, "activations"}}};

/// How many slots of each kind a layout has, and their sizes in bytes.
struct SlotPlan {
  uint32_t weight_ring = 0, gradient_ring = 0, activation_slots = 0, device_stages = 0;
  uint32_t stages = 0, records = 0, activation_stages = 0;
  uint64_t ring_bytes = 0, gradient_sum_bytes = 0, tied_gradient_bytes = 0, activation_bytes = 0;
  uint64_t stage_bytes = 0, record_bytes = 0, factored_bytes = 0, batch_bytes = 0;
  uint64_t device_bytes = 0, host_bytes = 0, nvme_bytes = 0;  ///< homes included
  bool allowed = true;  ///< no state is where the options forbid it
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

  /// Of what this rank keeps of a layer, and of all of it.
  uint64_t weight_bytes(uint32_t layer) const;
  uint64_t whole_weight_bytes(uint32_t layer) const;
  uint64_t gradient_sum_bytes(uint32_t layer) const;
  /// All micro-batches of a layer's input.
  uint64_t activation_bytes() const;
  uint64_t activation_page_bytes() const;
  /// Of the largest layer: chunks that this rank keeps, and those that it updates.
  uint32_t max_chunks() const;
  uint32_t max_own_chunks() const;
};

/// Slots and totals that the homes need; `generous` asks for pipelining room, else for the least.
SlotPlan plan_slots(const PlacementProblem& problem, const Homes& homes, bool generous);

/// Whether homes are within the budgets with pipelining room (true) or only with the least slots
/// (false); nothing where they are not.
std::optional<bool> fits_generously(const PlacementProblem& problem, const Homes& homes);

/// The options' homes, or where they have none: homes of a whole kind as near to the compute as
/// fits, else filled up in the order of saved traffic per byte. Throws Error(does_not_fit), or
/// Error(invalid_config) for NVMe homes without a drive.
Homes choose_homes(const PlacementProblem& problem, bool& generous);

/// The parameters of a chunk: the options', or by the size of a block and the host's memory.
uint64_t choose_chunk_parameters(const ModelShape& model, const PlanOptions& options);

/// The layout of homes and slots; budgets are not checked.
Layout build_layout(const PlacementProblem& problem, const Homes& homes, const SlotPlan& slots);

}  // namespace overspill
