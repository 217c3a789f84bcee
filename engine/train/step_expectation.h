// What a run's steps should take, to be said beside what they took: by the hardware profile's
// rates, without a profile by those that the run's own steps have shown. One thread.
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <optional>

#include "engine/forecast/forecast.h"

namespace overspill {

struct StepExpectation {
  TraceSummary predicted;
  SpeedOfLight light;
  bool from_profile = false;  ///< else from an earlier step of the run
};

/// For metrics.jsonl: seconds, what each lane is busy and moves, the speed of light and its
/// resource.
nlohmann::json expectation_object(const StepExpectation& expectation);

class StepExpectations {
 public:
  StepExpectations(const Layout& layout, const std::optional<HardwareProfile>& profile);

  /// Of a step with this Program; nothing without a profile before a step like it was learned from.
  const StepExpectation* of(const Program& program);
  /// Takes a finished step's rates: the first of each Program for of(), the last for costs_of().
  void learn(const Program& program, const Trace& trace);
  /// The rates of the last step learned from, if it had this Program, else of this trace.
  CostModel costs_of(const Program& program, const Trace& trace) const;
  /// The profile's or the default rates, for kinds of op that no step has shown yet.
  const CostModel& usual() const { return usual_; }

 private:
  CostModel usual_;
  bool has_profile_;
  std::map<const Program*, StepExpectation> known_;
  std::optional<CostModel> last_;
  const Program* last_program_ = nullptr;
};

}  // namespace overspill
