// What follows from a step's gradients: their norm, the clip factor, and whether they can be used.
// Shared by every loop that updates.
#pragma once

#include <cstdint>
#include <span>

#include "engine/collective/collective.h"
#include "engine/plan/layout.h"
#include "engine/run/page_store.h"

namespace overspill {

struct StepDecision {
  bool finite = false;
  double grad_norm = 0;
  double clip_factor = 1;
};

/// `squares`: of all gradients, which are `loss_scale` times what they should be. `limit`:
/// max_grad_norm, 0 for none.
StepDecision decide_step(double squares, bool non_finite, double limit, double loss_scale = 1);

/// Moves the factored moments of layers on to an update that is about to be pending. `shard`: the
/// ranks that share the state, which all call it at once. `layers`: by layer, whether it will be
/// updated; empty: all.
void advance_moments(const PageStore& store, const UpdateStep& update, Collective& shard,
                     std::span<const char> layers = {});

}  // namespace overspill
