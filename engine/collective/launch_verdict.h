// Which rank's end was the first cause of a run's end, and the launcher's exit code. Pure.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace overspill {

/// How one rank ended, in the order of the ends.
struct RankOutcome {
  uint32_t rank = 0;
  int process = 0;
  int exit_code = 0, signal = 0;
  bool killed_by_launcher = false;  ///< it did not end by itself
  std::string last_line = {};       ///< of its standard error
};

struct LaunchVerdict {
  int exit_code = 0;
  std::string text;  ///< one line naming the first cause; empty when there is nothing to say
};

/// `interrupt` is the signal that was passed on to the ranks, or 0.
LaunchVerdict judge_launch(const std::vector<RankOutcome>& outcomes, int interrupt,
                           std::chrono::milliseconds grace);

}  // namespace overspill
