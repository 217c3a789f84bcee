// The planner: a pure function from a layout and the kind of step to its Program. Layer-major:
// every micro-batch passes a layer before the next layer starts, so that weights move once a pass.
#pragma once

#include "engine/plan/layout.h"
#include "engine/program/program.h"

namespace overspill {

/// Plans one step. Kinds without forward or backward apply the pending update only (a flush).
/// Equal inputs give equal Programs. The order of each op's accesses is part of its meaning:
///   forward          weights, [input], output
///   loss             weights, input, gradient of input, [sums], [embedding], [its sums]
///   score            weights, input, [embedding]
///   backward         weights, input, gradient, [sums]; the embedding's: gradient, sums
/// [embedding]: when tied; [sums]: when any tensor of the layer trains. Frozen chunks are only
/// read: they have no update and no gradient, and layers below the lowest trainable one no
/// backward.
///   all_gather       this rank's part of the weights, then what it gathers into: the whole
///                    weights, or around the part in place the other ranks' before and behind it
///   reduce_scatter   sums
///   reduce_gradient  this rank's part of the sums
///   export_gradient  a chunk of the sums, the gradient page
///   update           weights, gradient (or a chunk of the sums), [remainder], [optimizer state]
///   copies           source, destination
Program plan_step(const Layout& layout, const StepKind& kind);

}  // namespace overspill
