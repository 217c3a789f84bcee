// From a configuration to a forecast's request: on this machine, or on one that a profile
// describes.
#pragma once

#include "engine/forecast/forecast.h"
#include "engine/train/config.h"

namespace overspill {

struct PlanTarget {
  /// Of another machine: its memory and drives are the budgets where the configuration sets none.
  /// Without: this machine's memory, and the configuration's profile or the defaults for rates.
  std::optional<HardwareProfile> hardware;
  uint32_t ranks = 1;
};

/// Part of a machine's memory and drives that a run may use by default: the rest is the system's.
inline constexpr double kDevicePart = 0.95, kHostPart = 0.9, kDrivePart = 0.9;
/// In whole pages.
uint64_t part_of_memory(uint64_t bytes, double part);

/// Throws Error as planning a run does.
ForecastRequest forecast_request(const TrainConfig& config, const PlanTarget& target);

}  // namespace overspill
