// What a step's execution has shown over all ranks. Every rank gets the same.
#pragma once

#include <vector>

#include "engine/collective/ranks.h"
#include "engine/run/step_context.h"

namespace overspill {

struct StepResults {
  std::vector<double> losses;  ///< summed over tokens, of each micro-batch in the data's order
  std::vector<double> gradient_squares;  ///< per layer; each parameter counted once
  bool non_finite = false;
  bool stop = false;  ///< a rank was asked to stop

  double loss_sum() const;
  double square_sum() const;
};

/// Puts together what each rank's StepContext holds and whether it is to stop.
StepResults share_results(const StepContext& context, bool stop, const Ranks& ranks);

/// Fails where the ranks' Programs would not meet on the collective lane: a bug, better than a wait
/// without end.
void require_same_collectives(const struct Program& program, const Ranks& ranks);

}  // namespace overspill
