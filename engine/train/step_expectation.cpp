// Simulates each of a run's Programs once.
#include "engine/train/step_expectation.h"

#include "engine/run/simulator.h"
#include "engine/train/metrics.h"

namespace overspill {
namespace {

StepExpectation expectation(const Program& program, const CostModel& costs, bool from_profile) {
  return {summarize(program, simulate(program, costs)), speed_of_light(program, costs),
          from_profile};
}

}  // namespace

nlohmann::json expectation_object(const StepExpectation& e) {
  return {{"step_seconds", e.predicted.seconds},
          {"lane_busy_seconds", lane_object(e.predicted.busy_seconds)},
          {"stall_seconds", lane_object(e.predicted.stall_seconds)},
          {"light_seconds", e.light.seconds},
          {"light_resource", e.light.resource},
          {"from", e.from_profile ? "profile" : "earlier step"}};
}

StepExpectations::StepExpectations(const Layout& layout,
                                   const std::optional<HardwareProfile>& profile)
    : usual_(cost_model(profile.value_or(HardwareProfile{}), layout)),
      has_profile_(profile.has_value()) {}

const StepExpectation* StepExpectations::of(const Program& program) {
  if (has_profile_ && !known_.contains(&program)) {
    known_.emplace(&program, expectation(program, usual_, true));
  }
  const auto found = known_.find(&program);
  return found == known_.end() ? nullptr : &found->second;
}

void StepExpectations::learn(const Program& program, const Trace& trace) {
  last_ = measure_costs(program, trace, usual_);
  last_program_ = &program;
  if (!known_.contains(&program)) known_.emplace(&program, expectation(program, *last_, false));
}

CostModel StepExpectations::costs_of(const Program& program, const Trace& trace) const {
  return last_program_ == &program ? *last_ : measure_costs(program, trace, usual_);
}

}  // namespace overspill
