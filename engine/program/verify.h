// An independent check of Programs: what the planner promises, re-derived from the data alone.
#pragma once

#include "engine/plan/layout.h"
#include "engine/program/program.h"

namespace overspill {

/// Throws Error(internal) naming the op when a Program breaks a rule:
/// - dependencies point backwards (so lanes, being FIFO, cannot deadlock), and ops of a kind have
///   their lane;
/// - accesses lie inside their slots, each on a page from its beginning, and lanes touch only
/// memory they can reach;
/// - two ops that touch the same bytes, one of them writing, are ordered;
/// - an op that reads a page finds that page there, whole and in its newest version, and its writer
///   has finished;
/// - updates touch each chunk with a trainable tensor once, when the step has any, and their
///   results end up at home; where a layer is updated twice, the second update starts from what the
///   first one started from; the backward leaves each such chunk's gradient, or updates it;
/// - chunks without one are only read: no update, no gradient, no write;
/// - micro-batches pass each layer in order, and nothing takes a layer's gradients before all have;
/// - with several ranks, compute finds weights gathered since they last changed, and gradients are
///   reduced over the ranks once;
/// - slots do not overlap, and arenas and NVMe stay within their budgets.
void verify_program(const Program& program, const Layout& layout);

}  // namespace overspill
