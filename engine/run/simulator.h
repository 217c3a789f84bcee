// Runs a Program on paper. Lanes are FIFO: an op begins when the one before it in its lane and all
// its dependencies have ended. Ops that run at the same time share resources
// (engine/plan/cost_model.h) as fluids do: all speeds rise together until a resource is used up;
// those that need it stay there, the others go on rising (max-min fairness).
#pragma once

#include "engine/plan/cost_model.h"
#include "engine/run/trace.h"

namespace overspill {

Trace simulate(const Program& program, const CostModel& costs);

}  // namespace overspill
