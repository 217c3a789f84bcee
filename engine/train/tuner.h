// `overspill tune`: searches settings of a training file, first in the simulator, then with a few
// short runs of the best. Settings are the file's own keys, so a result is a training file.
#pragma once

#include <atomic>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "engine/train/config.h"
#include "engine/train/plan_request.h"

namespace overspill {

/// Some settings, as `key=value`, and how fast a step is with them.
struct TuneTrial {
  std::vector<std::string> settings;  ///< empty: the file as it is
  double predicted = 0;               ///< seconds of a steady step
  std::optional<double> measured;     ///< median of the steps of a short run
};

struct TuneOptions {
  std::filesystem::path config;
  std::vector<std::string> overrides;  ///< of the command line; they hold in every trial
  uint32_t runs = 6;                   ///< short runs, the file as it is included; 0: simulate only
  uint32_t steps = 3;                  ///< measured in each, after those that settle
};

struct TuneReport {
  size_t simulated = 0;             ///< Programs
  std::vector<TuneTrial> best;      ///< by prediction, fastest first; the file as it is among them
  std::vector<TuneTrial> measured;  ///< in order of the runs; the first: the file as it is
  TuneTrial winner;                 ///< settings empty: nothing beats the file as it is
  /// Predicted step time by prefetch depth, with the winner's other settings.
  std::vector<std::pair<uint32_t, double>> by_depth;
};

/// Phase, done of total, and a line about the last one.
using TuneProgress =
    std::function<void(const char* phase, size_t done, size_t total, const std::string& text)>;
/// Runs a training file with settings and returns the median of its steady steps, in seconds.
using TuneRunner = std::function<double(const TrainConfig& config)>;

/// Runs in this process: loads, trains `steps` steps after those that settle, keeps nothing.
TuneRunner short_runs(uint32_t steps, const std::atomic<bool>& stop);

/// Throws Error(cancelled) when `stop` is set; Error as planning and training do for the file as
/// it is. Settings that do not fit are passed over.
TuneReport tune(const TuneOptions& options, const TuneRunner& run, const std::atomic<bool>& stop,
                const TuneProgress& progress);

/// For people: every run predicted and measured, and what won.
std::string tune_text(const TuneReport& report);
/// The same with the plot of step time over prefetch depth; self-contained.
std::string tune_html(const TuneReport& report);
std::string tune_json(const TuneReport& report);
/// The training file with the overrides and the winner's settings in their places. Comments are not
/// kept.
std::string tuned_yaml(const std::filesystem::path& config,
                       const std::vector<std::string>& overrides, const TuneReport& report);

}  // namespace overspill
