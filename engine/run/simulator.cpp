// The simulator.
#include "engine/run/simulator.h"

#include <algorithm>
#include <cmath>

namespace overspill {

Trace simulate(const Program& program, const HardwareProfile& profile) {
  Trace trace;
  trace.events.resize(program.ops.size());
  std::array<int64_t, kLanes> lane_end{};
  for (size_t i = 0; i < program.ops.size(); ++i) {
    const Op& op = program.ops[i];
    int64_t& end = lane_end[static_cast<size_t>(op.lane)];
    int64_t begin = end;
    for (const OpId dep : program.deps_of(op)) {
      begin = std::max(begin, trace.events[dep.value].end_ns);
    }
    end = begin + std::llround(profile.seconds(op) * 1e9);
    trace.events[i] = {begin, end};
  }
  return trace;
}

}  // namespace overspill
