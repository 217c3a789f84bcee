// Learning-rate schedules with linear warmup, as transformers defines them. Pure function.
#pragma once

#include <cstdint>

namespace overspill {

enum class LrScheduler : uint8_t { constant, linear, cosine };

struct LrSchedule {
  LrScheduler scheduler = LrScheduler::constant;
  double learning_rate = 0;
  uint64_t warmup_steps = 0;
  uint64_t total_steps = 1;

  /// The rate of update `step` (from 0): warmup rises by 1/warmup_steps a step from 0; then
  /// constant, linear to 0 or half a cosine to 0 at total_steps.
  double at(uint64_t step) const;
};

}  // namespace overspill
