// The search: a grid in the simulator, then short runs of its best and of drive settings around the
// fastest of them.
#include "engine/train/tuner.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "engine/base/error.h"
#include "engine/base/log.h"
#include "engine/base/units.h"
#include "engine/model/llama.h"
#include "engine/train/trainer.h"

namespace overspill {
namespace {

/// A shorter step than the file's by less is noise.
constexpr double kWorthChanging = 0.99;
constexpr double kSettingCost = 0.002, kSameProgram = 0.0005;
constexpr uint32_t kDeepest = 4;
constexpr size_t kPlaced = 40;  // points whose placement is searched
constexpr size_t kKept = 20;    // predictions
constexpr size_t kShown = 20;   // lines of progress

/// One dimension of the grid: settings that exclude each other; an empty one keeps the file's.
using Axis = std::vector<std::vector<std::string>>;

std::vector<std::string> both(std::vector<std::string> a, const std::vector<std::string>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

Axis depth_axis() {
  Axis axis = {{}};
  for (uint32_t depth = 0; depth <= kDeepest; ++depth) {
    axis.push_back({fmt::format("offload.prefetch_depth={}", depth)});
  }
  return axis;
}

Axis chunk_axis(const Layout& layout) {
  Axis axis = {{}};
  for (const double factor : {0.125, 0.25, 0.5, 2.0, 4.0}) {
    const double wanted = factor * static_cast<double>(layout.chunk_parameters);
    const uint64_t chunk = round_up(static_cast<uint64_t>(wanted), kParameterAlignment);
    axis.push_back({fmt::format("offload.chunk_parameters={}", chunk)});
  }
  return axis;
}

/// In the backward changes what is computed where gradients are clipped, so only without.
Axis update_axis(const TrainConfig& config) {
  Axis axis = {{}, {"offload.update=next_forward"}, {"offload.update=twice"}};
  if (config.max_grad_norm == 0 && config.offload.gradients == Placement::automatic) {
    axis.push_back({"offload.update=in_backward"});
  }
  return axis;
}

/// The same sequences a step, in fewer and larger micro-batches or more and smaller ones.
Axis split_axis(const TrainConfig& config) {
  Axis axis = {{}};
  const uint64_t sequences = uint64_t{config.micro_batch_size} * config.gradient_accumulation_steps;
  for (uint64_t size = 1; size <= sequences; size *= 2) {
    if (sequences % size != 0 || size == config.micro_batch_size) continue;
    if (size > 4 * uint64_t{config.micro_batch_size}) break;
    axis.push_back({fmt::format("micro_batch_size={}", size),
                    fmt::format("gradient_accumulation_steps={}", sequences / size)});
  }
  return axis;
}

Axis slot_axis() {
  Axis axis = {{}};
  for (const uint32_t slots : {4u, 16u, 64u}) {
    axis.push_back({fmt::format("offload.record_slots={}", slots),
                    fmt::format("offload.stage_slots={}", 2 * slots)});
  }
  return axis;
}

std::vector<std::vector<std::string>> grid(std::span<const Axis> axes) {
  std::vector<std::vector<std::string>> points = {{}};
  for (const Axis& axis : axes) {
    std::vector<std::vector<std::string>> longer;
    for (const auto& point : points) {
      for (const auto& settings : axis) longer.push_back(both(point, settings));
    }
    points = std::move(longer);
  }
  return points;
}

/// Settings of the drives' queues, which the simulator takes as the profile has them.
Axis drive_settings(const TrainConfig& config) {
  const IoOptions& io = config.offload.io;
  Axis axis;
  for (const uint64_t block : {io.block_size * 2, io.block_size / 2}) {
    if (block < 256 * kKiB || block > 16 * kMiB) continue;
    axis.push_back({fmt::format("offload.io.block_size={}", block)});
  }
  for (const uint32_t depth : {io.queue_depth * 2, io.queue_depth / 2}) {
    if (depth < 2 || depth > 128) continue;
    axis.push_back({fmt::format("offload.io.queue_depth={}", depth)});
  }
  return axis;
}

/// A directory for what a run writes beside its state; removed with all that is in it.
class ScratchDirectory {
 public:
  ScratchDirectory() {
    std::string pattern =
        (std::filesystem::temp_directory_path() / "overspill-tune-XXXXXX").string();
    if (::mkdtemp(pattern.data()) == nullptr) {
      fail(ErrorCode::io,
           "{}: cannot be created: {}; set TMPDIR to a directory that can be written", pattern,
           std::strerror(errno));
    }
    path_ = pattern;
  }
  ~ScratchDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  ScratchDirectory(const ScratchDirectory&) = delete;
  ScratchDirectory& operator=(const ScratchDirectory&) = delete;
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

class Tuner {
 public:
  Tuner(const TuneOptions& options, const TuneRunner& run, const std::atomic<bool>& stop,
        const TuneProgress& progress)
      : options_(options), run_(run), stop_(stop), progress_(progress), base_(config({})) {}

  TuneReport tune() {
    if (!base_.offload.hardware_profile) {
      log_warning(
          "{}: no offload.hardware_profile, so predictions use the rates of a small server; "
          "`overspill bench all --profile` measures this machine's",
          options_.config.string());
    }
    simulate();
    measure();
    plot_depths();
    return std::move(report_);
  }

 private:
  TrainConfig config(const std::vector<std::string>& settings) const {
    TrainConfig config = load_train_config(options_.config, both(options_.overrides, settings));
    resolve_batch(config, 1);
    return config;
  }

  void check_stop() const {
    if (stop_) fail(ErrorCode::cancelled, "interrupted; nothing was written");
  }

  /// Nothing for settings that do not fit. `effort` as of solve_placement: 0 for thousands of
  /// points.
  std::optional<double> predict(const std::vector<std::string>& settings, double effort) {
    check_stop();
    try {
      ForecastRequest request = forecast_request(config(settings), {});
      request.search_effort = settings.empty() ? 1 : effort;  // what is measured against
      const Forecast f = make_forecast(request);
      ++report_.simulated;
      return f.seconds();
    } catch (const Error& error) {
      if (settings.empty() || error.code() == ErrorCode::cancelled) throw;
      return std::nullopt;
    }
  }

  /// All points with the placement that costs nothing to find, then the best as a run places them.
  void simulate() {
    const Layout layout = make_forecast(forecast_request(base_, {})).layout;
    std::array<Axis, 5> axes = {depth_axis(), chunk_axis(layout), update_axis(base_),
                                split_axis(base_), slot_axis()};
    for (Axis& axis : axes) keep_overrides(axis);
    predict_all("simulate", grid(axes), 0);
    std::vector<std::vector<std::string>> points(1);  // the file as it is
    for (const TuneTrial& trial : report_.best) {
      if (points.size() > kPlaced) break;
      if (!trial.settings.empty()) points.push_back(trial.settings);
    }
    predict_all("place", points, 1);
    const TuneTrial file = *file_as_it_is();
    drop_equals();
    if (file_as_it_is() == report_.best.end()) report_.best.push_back(file);
  }

  /// What the command line sets is not searched.
  void keep_overrides(Axis& axis) const {
    const auto key = [](const std::string& setting) {
      return setting.substr(0, setting.find('='));
    };
    std::erase_if(axis, [&](const std::vector<std::string>& settings) {
      return std::ranges::any_of(settings, [&](const std::string& setting) {
        return std::ranges::any_of(options_.overrides, [&](const std::string& override) {
          return key(override) == key(setting);
        });
      });
    });
  }

  std::vector<TuneTrial>::iterator file_as_it_is() {
    return std::ranges::find_if(report_.best,
                                [](const TuneTrial& trial) { return trial.settings.empty(); });
  }

  /// Fills report_.best, fastest first.
  void predict_all(const char* phase, const std::vector<std::vector<std::string>>& points,
                   double effort) {
    report_.best.clear();
    const size_t shown = std::max<size_t>(1, points.size() / kShown);
    for (size_t i = 0; i < points.size(); ++i) {
      const std::optional<double> seconds = predict(points[i], effort);
      if (seconds) report_.best.push_back({points[i], *seconds, std::nullopt});
      const size_t done = i + 1;
      if (done % shown == 0 || done == points.size()) progress_(phase, done, points.size(), "");
    }
    // A change must earn what makes the file longer.
    std::ranges::stable_sort(report_.best, {}, [](const TuneTrial& trial) {
      return trial.predicted * (1 + kSettingCost * static_cast<double>(trial.settings.size()));
    });
  }

  /// Of neighbours with the same predicted time, which mostly are the same Program, keeps the
  /// first.
  void drop_equals() {
    std::vector<TuneTrial> kept;
    for (TuneTrial& trial : report_.best) {
      const bool equal =
          !kept.empty() && std::abs(trial.predicted / kept.back().predicted - 1) < kSameProgram;
      if (!equal && kept.size() < kKept) kept.push_back(std::move(trial));
    }
    report_.best = std::move(kept);
  }

  void measure_one(TuneTrial trial) {
    check_stop();
    trial.measured = run_(config(trial.settings));
    report_.measured.push_back(trial);
    progress_(
        "run", report_.measured.size(), options_.runs,
        fmt::format(
            "{}: {}",
            trial.settings.empty() ? "as it is" : fmt::format("{}", fmt::join(trial.settings, " ")),
            format_seconds(*trial.measured)));
  }

  bool runs_left() const { return report_.measured.size() < options_.runs; }

  /// Half of the runs for the simulator's best, the others for the drives' queues with the fastest.
  void measure() {
    const auto as_is = file_as_it_is();
    report_.winner = *as_is;
    if (options_.runs == 0) {
      const TuneTrial& best = report_.best.front();
      if (best.predicted < kWorthChanging * as_is->predicted) report_.winner = best;
      return;
    }
    measure_one(*as_is);
    const uint32_t half = 1 + options_.runs / 2;
    for (const TuneTrial& trial : report_.best) {
      if (report_.measured.size() >= half) break;
      if (!trial.settings.empty()) measure_one(trial);
    }
    if (base_.offload.nvme_paths.empty()) return choose_winner();
    TuneTrial best = fastest();
    Axis queues = drive_settings(base_);
    keep_overrides(queues);
    for (const auto& settings : queues) {
      if (!runs_left()) break;
      measure_one({both(best.settings, settings), best.predicted, std::nullopt});
      best = fastest();
    }
    choose_winner();
  }

  const TuneTrial& fastest() const {
    return *std::ranges::min_element(report_.measured, {},
                                     [](const TuneTrial& trial) { return *trial.measured; });
  }

  void choose_winner() {
    const TuneTrial& as_is = report_.measured.front();
    const TuneTrial& best = fastest();
    report_.winner = *best.measured < kWorthChanging * *as_is.measured ? best : as_is;
  }

  void plot_depths() {
    for (uint32_t depth = 0; depth <= kDeepest; ++depth) {
      const auto settings =
          both(report_.winner.settings, {fmt::format("offload.prefetch_depth={}", depth)});
      if (const auto seconds = predict(settings, 1)) report_.by_depth.emplace_back(depth, *seconds);
    }
  }

  const TuneOptions& options_;
  const TuneRunner& run_;
  const std::atomic<bool>& stop_;
  const TuneProgress& progress_;
  const TrainConfig base_;
  TuneReport report_;
};

}  // namespace

TuneRunner short_runs(uint32_t steps, const std::atomic<bool>& stop) {
  return [steps, &stop](const TrainConfig& config) {
    const ScratchDirectory scratch;
    TrainConfig trial = config;
    trial.resume_from_checkpoint.clear();
    trial.output_dir = scratch.path();
    Trainer trainer(trial);
    std::vector<TraceSummary> timed = trainer.time_steps(steps, stop);
    if (timed.size() < steps) fail(ErrorCode::cancelled, "interrupted; nothing was written");
    const auto middle = timed.begin() + static_cast<ptrdiff_t>(timed.size() / 2);
    std::ranges::nth_element(timed, middle, {}, &TraceSummary::seconds);
    return middle->seconds;
  };
}

TuneReport tune(const TuneOptions& options, const TuneRunner& run, const std::atomic<bool>& stop,
                const TuneProgress& progress) {
  return Tuner(options, run, stop, progress).tune();
}

}  // namespace overspill
