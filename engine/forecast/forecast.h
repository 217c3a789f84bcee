// What a run will be like on some hardware, before it is started and without its weights: what fits
// where, how long a step takes and why, what it costs the drives. Pure functions.
#pragma once

#include <optional>
#include <string>

#include "engine/plan/cost_model.h"
#include "engine/run/trace.h"

namespace overspill {

/// What to plan for. Budgets of `options` are one rank's.
struct ForecastRequest {
  ModelShape model;
  PlanOptions options;
  HardwareProfile hardware;
  std::optional<uint64_t> steps;  ///< of the run, where it is known
  double search_effort = 1;       ///< of solve_placement
};

/// The time that no schedule of the same work can beat: what one resource needs for it alone.
struct SpeedOfLight {
  double seconds = 0;
  std::string resource;  ///< a lane's name, "drives", "link", "cores" or "memory"
};
SpeedOfLight speed_of_light(const Program& program, const CostModel& costs);

struct Forecast {
  Layout layout;
  Program program;  ///< of a steady step, one rank's
  Trace trace;
  TraceSummary summary;
  Lane bottleneck = Lane::compute;  ///< the busiest lane
  SpeedOfLight light;
  double tokens_per_step = 0;        ///< of all ranks
  uint64_t written_per_step = 0;     ///< bytes on all drives, by all ranks
  std::optional<double> life_days;   ///< until the drives' endurance is used up, training all day
  std::optional<double> life_share;  ///< part of the endurance that the run's steps use
  double load_seconds = 0;           ///< from a checkpoint on the same drives to the first step
  double save_seconds = 0;           ///< of a checkpoint with optimizer state, on the same drives

  double seconds() const { return summary.seconds; }
  double tokens_per_second() const { return tokens_per_step / summary.seconds; }
};

/// What fills a tier of one rank, in bytes: pages at home there, and buffers, which are the slots
/// that pages pass through.
struct TierUse {
  uint64_t weights = 0, optimizer = 0, gradients = 0;
  uint64_t activations = 0;  ///< with their gradients
  uint64_t buffers = 0;
  uint64_t used = 0;  ///< all of the above
  uint64_t budget = 0;
};
TierUse tier_use(const Layout& layout, Tier tier);

/// Throws Error(does_not_fit) saying what is short.
Forecast make_forecast(const ForecastRequest& request);

/// The step's Program in a run's steady state: with an update pending.
StepKind steady_step(const PlanOptions& options);

}  // namespace overspill
