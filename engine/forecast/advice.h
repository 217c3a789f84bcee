// What to change for the largest gain: other settings and other hardware, each tried by a forecast.
#pragma once

#include <string>
#include <vector>

#include "engine/forecast/forecast.h"

namespace overspill {

struct Advice {
  std::string change;  ///< "gradient_accumulation_steps: 16", "twice the drives"
  bool setting;        ///< of the run's file; else of the machine
  double seconds;      ///< predicted step time
  double tokens_per_second;
  double gain;                ///< tokens per second over those of the request
  uint64_t written_per_step;  ///< bytes on all drives
};

/// Changes that the request could make and that fit, the largest gain first; those that gain less
/// than a percent are left out. Tried with larger chunks where that keeps planning fast.
std::vector<Advice> advise(const ForecastRequest& request);

}  // namespace overspill
