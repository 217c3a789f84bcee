// From event to event: at each, ops end and begin, and speeds change.
#include "engine/run/simulator.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace overspill {
namespace {

constexpr uint32_t kNone = UINT32_MAX;

class Simulation {
 public:
  Simulation(const Program& program, const CostModel& costs)
      : program_(program), costs_(costs), ended_(program.ops.size(), false) {
    trace_.events.resize(program.ops.size());
    for (uint32_t i = 0; i < program.ops.size(); ++i) {
      lanes_[static_cast<size_t>(program.ops[i].lane)].ops.push_back(i);
    }
  }

  Trace run() {
    while (true) {
      begin_ops();
      set_speeds();
      double wait = std::numeric_limits<double>::infinity();
      for (const LaneState& lane : lanes_) {
        if (lane.running != kNone) wait = std::min(wait, lane.left_ns / lane.speed);
      }
      if (std::isinf(wait)) return std::move(trace_);
      end_ops(wait);
    }
  }

 private:
  struct LaneState {
    std::vector<uint32_t> ops;  ///< in order
    size_t next = 0;
    uint32_t running = kNone;
    double left_ns = 0;  ///< of the running op, at full speed
    double speed = 1;
  };

  bool ready(uint32_t op) const {
    return std::ranges::all_of(program_.deps_of(program_.ops[op]),
                               [&](OpId dep) { return ended_[dep.value]; });
  }

  void begin_ops() {
    for (LaneState& lane : lanes_) {
      if (lane.running != kNone || lane.next == lane.ops.size()) continue;
      const uint32_t op = lane.ops[lane.next];
      if (!ready(op)) continue;
      ++lane.next;
      lane.running = op;
      lane.left_ns = std::round(costs_.seconds(program_.ops[op]) * 1e9);
      trace_.events[op].begin_ns = std::llround(now_ns_);
      changed_ = true;
    }
  }

  /// Progressive filling; at most one round per lane.
  void set_speeds() {
    if (!changed_) return;
    changed_ = false;
    std::array<double, kResources> left;
    left.fill(1.0);
    std::array<bool, kLanes> rising{};
    for (size_t i = 0; i < kLanes; ++i) {
      rising[i] = lanes_[i].running != kNone;
      lanes_[i].speed = 0;
    }
    while (std::ranges::find(rising, true) != rising.end()) {
      double step = 1.0;
      for (size_t i = 0; i < kLanes; ++i) {
        if (rising[i]) step = std::min(step, 1.0 - lanes_[i].speed);
      }
      std::array<double, kResources> demand{};
      for (size_t i = 0; i < kLanes; ++i) {
        for (size_t r = 0; rising[i] && r < kResources; ++r) demand[r] += uses(i)[r];
      }
      for (size_t r = 0; r < kResources; ++r) {
        if (demand[r] > 0) step = std::min(step, left[r] / demand[r]);
      }
      for (size_t r = 0; r < kResources; ++r) left[r] -= step * demand[r];
      for (size_t i = 0; i < kLanes; ++i) {
        if (!rising[i]) continue;
        lanes_[i].speed += step;
        rising[i] = lanes_[i].speed < 1.0 - kExhausted;
        for (size_t r = 0; r < kResources; ++r) {
          if (uses(i)[r] > 0 && left[r] < kExhausted) rising[i] = false;
        }
      }
    }
    // An op that takes more than all of a resource alone would stand still beside nothing.
    for (LaneState& lane : lanes_) {
      if (lane.running != kNone) lane.speed = lane.speed > 1.0 - kExhausted ? 1.0 : lane.speed;
    }
  }

  const std::array<double, kResources>& uses(size_t lane) const {
    return costs_.rate(program_.ops[lanes_[lane].running]).uses;
  }

  void end_ops(double wait) {
    now_ns_ += wait;
    for (LaneState& lane : lanes_) {
      if (lane.running == kNone) continue;
      lane.left_ns -= wait * lane.speed;
      if (lane.left_ns > kEndedNs) continue;
      trace_.events[lane.running].end_ns = std::llround(now_ns_);
      ended_[lane.running] = true;
      lane.running = kNone;
      changed_ = true;
    }
  }

  static constexpr double kExhausted = 1e-12;
  static constexpr double kEndedNs = 1e-6;  // below the resolution of times

  const Program& program_;
  const CostModel& costs_;
  Trace trace_;
  std::array<LaneState, kLanes> lanes_;
  std::vector<char> ended_;
  double now_ns_ = 0;
  bool changed_ = true;
};

}  // namespace

Trace simulate(const Program& program, const CostModel& costs) {
  return Simulation(program, costs).run();
}

}  // namespace overspill
