// What to change for the largest gain: other settings and other hardware, each tried by a forecast.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "engine/forecast/forecast.h"

namespace overspill {

struct Advice {
  std::string change{};  ///< "gradient_accumulation_steps: 16", "twice the drives"
  bool setting = false;  ///< of the run's file; else of the machine
  double seconds = 0;    ///< predicted step time
  double tokens_per_second = 0;
  double gain = 0;                ///< tokens per second over those of the request
  uint64_t written_per_step = 0;  ///< bytes on all drives
};

/// Nothing where no change was tried.
using TriedAdvice = std::optional<std::vector<Advice>>;

/// The best few changes that the request could make and that fit, the largest gain over its
/// forecast `now` first; those that gain less than a percent are left out. Numbers are what
/// make_forecast says of the changed request; which ones to ask it about is found with larger
/// chunks and less search.
std::vector<Advice> advise(const ForecastRequest& request, const Forecast& now);

}  // namespace overspill
