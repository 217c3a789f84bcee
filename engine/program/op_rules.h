// Rules of the verifier that hold for each op on its own, and for layouts: the same for whole steps
// and for fragments. Internal to engine/program.
#pragma once

#include <vector>

#include "engine/plan/layout.h"
#include "engine/program/program.h"

namespace overspill {

/// Slots do not overlap, and arenas and NVMe stay within their budgets.
void check_layout(const Layout& layout);
/// Dependencies point backwards.
void check_dependencies(const Program& program, OpId id);
/// Ops of a kind have their lane.
void check_lane(const Program& program, OpId id);
/// The access lies inside its slot, in memory that the op's lane reaches.
void check_reach(const Program& program, const Layout& layout, OpId id, const Access& access);
/// The state that an update reads and the state that it writes are one array.
void check_state_place(const Program& program, const Layout& layout, OpId id);
/// By chunk of a layer, whether it holds a part of a trainable tensor; from the model, not from the
/// chunk table.
std::vector<char> training_chunks(const Layout& layout, uint32_t layer);
/// Whether an op takes this rank's part of a layer's sums alone.
bool takes_own_part(OpKind kind);
/// Whether an op leaves what it finds in another place.
bool moves_pages(OpKind kind);

}  // namespace overspill
