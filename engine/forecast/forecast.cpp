// Plans a steady step, simulates it, and adds up what follows.
#include "engine/forecast/forecast.h"

#include <algorithm>

#include "engine/forecast/placement_search.h"
#include "engine/plan/planner.h"
#include "engine/run/simulator.h"

namespace overspill {
namespace {

constexpr std::array<const char*, kResources> kResourceNames = {"drives", "link", "cores",
                                                                "memory"};
constexpr double kSecondsOfDay = 86400;

/// This rank's part of a checkpoint's weights (bf16 or float32), and with its optimizer state:
/// master and moments.
double checkpoint_bytes(const Layout& layout, bool with_state) {
  double bytes = 0;
  for (const Page& page : layout.pages) {
    const bool state = page.kind == PageKind::optimizer && with_state;
    const bool weight =
        page.kind == PageKind::weight && layout.owns(layout.chunk(page.layer, page.index));
    if (weight || state) bytes += static_cast<double>(page.bytes);
  }
  return bytes / layout.options.replicas;
}

void add_endurance(const ForecastRequest& request, Forecast& f) {
  const auto endurance = static_cast<double>(request.hardware.drives.endurance);
  const auto written = static_cast<double>(f.written_per_step);
  if (endurance == 0 || written == 0) return;
  f.life_days = endurance / written * f.seconds() / kSecondsOfDay;
  if (request.steps) f.life_share = written * static_cast<double>(*request.steps) / endurance;
}

/// Loading reads the weights and writes those and the state that live on drives; saving reads what
/// lives there and writes the checkpoint. Reads and writes of the same drives take turns.
void add_load_and_save(const ForecastRequest& request, Forecast& f) {
  const DrivesProfile& d = request.hardware.drives;
  const double ranks = request.options.world();
  const auto spilled = static_cast<double>(f.layout.home_bytes(PageKind::weight, Tier::nvme) +
                                           f.layout.home_bytes(PageKind::optimizer, Tier::nvme));
  f.load_seconds = ranks * (checkpoint_bytes(f.layout, false) / d.read + spilled / d.write);
  f.save_seconds = ranks * (spilled / d.read + checkpoint_bytes(f.layout, true) / d.write);
}

}  // namespace

StepKind steady_step(const PlanOptions& options) {
  const bool pending = options.update == UpdateTiming::next_forward;
  return {true, true, pending, false, options.micro_batches};
}

SpeedOfLight speed_of_light(const Program& program, const CostModel& costs) {
  std::array<double, kLanes> lanes{};
  std::array<double, kResources> resources{};
  for (const Op& op : program.ops) {
    const double work = static_cast<double>(op.work) / costs.rate(op).work_per_second;
    lanes[static_cast<size_t>(op.lane)] += work;
    for (size_t r = 0; r < kResources; ++r) resources[r] += work * costs.rate(op).uses[r];
  }
  SpeedOfLight light;
  const auto raise = [&](double seconds, const char* name) {
    if (seconds > light.seconds) light = {seconds, name};
  };
  for (size_t i = 0; i < kLanes; ++i) raise(lanes[i], lane_name(static_cast<Lane>(i)));
  for (size_t r = 0; r < kResources; ++r) raise(resources[r], kResourceNames[r]);
  return light;
}

TierUse tier_use(const Layout& layout, Tier tier) {
  const PlanOptions& o = layout.options;
  const std::array<std::pair<uint64_t, uint64_t>, 3> sizes = {
      {{layout.device_bytes, o.device_memory},
       {layout.host_bytes, o.host_memory},
       {layout.nvme_bytes, o.nvme_capacity}}};
  const auto [used, budget] = sizes[static_cast<size_t>(tier)];
  TierUse use{.weights = layout.home_bytes(PageKind::weight, tier),
              .optimizer = layout.home_bytes(PageKind::optimizer, tier),
              .gradients = layout.home_bytes(PageKind::gradient, tier),
              .activations = layout.home_bytes(PageKind::activation, tier) +
                             layout.home_bytes(PageKind::activation_gradient, tier),
              .used = used,
              .budget = budget};
  use.buffers = used - (use.weights + use.optimizer + use.gradients + use.activations);
  return use;
}

Forecast make_forecast(const ForecastRequest& request) {
  Forecast f;
  f.layout = plan_layout(request.model, solve_placement(request.model, request.options,
                                                        request.hardware, request.search_effort)
                                            .options);
  f.program = plan_step(f.layout, steady_step(request.options));
  const CostModel costs = cost_model(request.hardware, f.layout, request.options.world());
  f.trace = simulate(f.program, costs);
  f.summary = summarize(f.program, f.trace);
  const auto& busy = f.summary.busy_seconds;
  f.bottleneck = static_cast<Lane>(std::ranges::max_element(busy) - busy.begin());
  f.light = speed_of_light(f.program, costs);
  const uint32_t ranks = request.options.world();
  f.tokens_per_step = static_cast<double>(request.options.micro_batch_tokens *
                                          request.options.micro_batches * ranks);
  f.written_per_step = ranks * f.summary.bytes[static_cast<size_t>(Lane::nvme_write)];
  add_endurance(request, f);
  add_load_and_save(request, f);
  return f;
}

}  // namespace overspill
