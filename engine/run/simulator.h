// Runs a Program on paper: one pass, since lanes are FIFO and dependencies point backwards.
//   begin(op) = max(end(previous in lane), end(deps));  end(op) = begin(op) + duration(op)
#pragma once

#include "engine/plan/profile.h"
#include "engine/run/trace.h"

namespace overspill {

Trace simulate(const Program& program, const HardwareProfile& profile);

}  // namespace overspill
