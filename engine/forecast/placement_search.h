// Placement solved: where every layer's pages live, which layers are updated twice and how far
// loads run ahead, so that the predicted step is the fastest within the budgets. Pure functions.
#pragma once

#include <optional>
#include <string>

#include "engine/plan/layout.h"
#include "engine/plan/profile.h"

namespace overspill {

/// How much longer a step may take at most to write nothing to drives instead of all of its state:
/// drives wear. What lies between costs in proportion to the bytes. Reads weigh less, so that none
/// are made for nothing.
inline constexpr double kWriteWeight = 0.01, kReadWeight = 0.001;

struct PlacementChoice {
  PlanOptions options;        ///< with homes, layers updated twice and depth, for plan_layout
  double seconds = 0;         ///< predicted for a step, as finely as the choice was made
  double greedy_seconds = 0;  ///< the same of the greedy placement; 0 where that does not fit
  uint64_t written = 0;       ///< bytes a step to drives by this rank
  uint32_t trials = 0;        ///< placements that were simulated
  bool searched = false;      ///< false: nothing was left open
};

/// Chooses what the options leave open: kinds that are `automatic`, the prefetch depth unless set,
/// and layers to update twice where updates run in the next forward and none was asked for. Minimal
/// is seconds * (1 + (kWriteWeight * written + kReadWeight * read) / state) of a steady step.
/// Deterministic, bounded by simulated ops, `effort` times the usual number; 0 leaves the options
/// as they are. Throws as plan_layout does.
PlacementChoice solve_placement(const ModelShape& model, const PlanOptions& options,
                                const HardwareProfile& profile, double effort = 1);

/// One line: homes by kind, layers updated twice, depth, the prediction and its gain.
std::string describe(const PlacementChoice& choice);

}  // namespace overspill
