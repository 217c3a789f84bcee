// Learning-rate schedules.
#include "optim/lr_schedule.h"

#include <algorithm>
#include <cmath>

namespace overspill {

double LrSchedule::at(uint64_t step) const {
  if (step < warmup_steps) {
    return learning_rate * static_cast<double>(step) / static_cast<double>(warmup_steps);
  }
  const double span =
      static_cast<double>(std::max<uint64_t>(1, total_steps - std::min(total_steps, warmup_steps)));
  const double progress = std::min(1.0, static_cast<double>(step - warmup_steps) / span);
  switch (scheduler) {
    case LrScheduler::constant: return learning_rate;
    case LrScheduler::linear: return learning_rate * (1.0 - progress);
    case LrScheduler::cosine:
      return learning_rate * 0.5 * (1.0 + std::cos(3.14159265358979323846 * progress));
  }
  return learning_rate;
}

}  // namespace overspill
