// Each change is a function of the request. All are tried quickly, the best few as a plan of them
// would be.
#include "engine/forecast/advice.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>

#include "engine/base/error.h"
#include "engine/base/parallel.h"
#include "engine/base/units.h"

namespace overspill {
namespace {

constexpr double kWorthSaying = 1.01;
/// Programs of more chunks say no more about a step's time.
constexpr uint64_t kFineChunks = 1024;
constexpr double kQuickSearch = 0.1;  // of a run's own search
constexpr size_t kConfirmed = 4;

struct Change {
  std::string text;
  bool setting;
  std::function<void(ForecastRequest&)> apply;
};

void add_drives(ForecastRequest& request) {
  DrivesProfile& d = request.hardware.drives;
  d.count *= 2;
  d.capacity *= 2;
  d.endurance *= 2;
  for (double* rate : {&d.read, &d.write, &d.mixed_read, &d.mixed_write}) *rate *= 2;
  request.options.nvme_capacity =
      std::max(request.options.nvme_capacity, request.options.nvme_capacity * 2);
}

std::vector<Change> changes(const ForecastRequest& request) {
  const PlanOptions& o = request.options;
  std::vector<Change> list;
  const auto setting = [&](std::string text, std::function<void(ForecastRequest&)> apply) {
    list.push_back({std::move(text), true, std::move(apply)});
  };
  setting(fmt::format("gradient_accumulation_steps: {} (a larger batch)", 2 * o.micro_batches),
          [](ForecastRequest& r) { r.options.micro_batches *= 2; });
  if (o.optimizer_settings.kind != OptimizerKind::adafactor) {
    if (o.optimizer_settings.state == StateFormat::float32) {
      setting("optimizer_state: bfloat16", [](ForecastRequest& r) {
        r.options.optimizer_settings.state = StateFormat::bfloat16;
      });
    }
    if (o.optimizer_settings.state != StateFormat::int8) {
      setting("optimizer_state: int8",
              [](ForecastRequest& r) { r.options.optimizer_settings.state = StateFormat::int8; });
    }
  }
  if (o.update != UpdateTiming::in_backward) {
    setting("offload.update: in_backward, max_grad_norm: 0 (no clipping)", [](ForecastRequest& r) {
      r.options.update = UpdateTiming::in_backward;
      r.options.update_twice.clear();
      r.options.gradients = Placement::automatic;
    });
  }
  if (o.update == UpdateTiming::next_forward && !o.update_twice.empty()) {
    setting("offload.update: auto", [](ForecastRequest& r) { r.options.update_twice.clear(); });
  }
  const uint32_t depth = o.prefetch_depth.value_or(1);
  setting(fmt::format("offload.prefetch_depth: {}", depth + 1),
          [=](ForecastRequest& r) { r.options.prefetch_depth = depth + 1; });
  list.push_back({"twice the drives", false, add_drives});
  list.push_back(
      {"twice the host memory", false, [](ForecastRequest& r) { r.options.host_memory *= 2; }});
  return list;
}

/// Chunks of other sizes: tried with the placement at hand, because coarse ones say nothing of
/// them.
std::vector<Change> chunk_changes(uint64_t chunk) {
  std::vector<Change> list;
  for (const uint64_t other : {2 * chunk, round_up(chunk / 2, kParameterAlignment)}) {
    if (other == chunk) continue;
    list.push_back({fmt::format("offload.chunk_parameters: {}", other), true,
                    [=](ForecastRequest& r) { r.options.chunk_parameters = other; }});
  }
  return list;
}

/// The request with chunks so large that planning takes little.
ForecastRequest coarse(ForecastRequest request) {
  const uint64_t share = request.model.parameters() / request.options.ranks / kFineChunks;
  constexpr uint64_t kDefaultMost = uint64_t{4} << 20;
  if (!request.options.chunk_parameters && share > kDefaultMost) {
    request.options.chunk_parameters = share / kParameterAlignment * kParameterAlignment;
  }
  request.search_effort = kQuickSearch;
  return request;
}

struct Candidate {
  Change change;
  bool resized = false;  ///< its chunks
  Advice outcome{};
};

/// The forecast of the changed request, its gain left open; zeros where it does not fit.
Advice outcome(const Change& change, ForecastRequest request) {
  change.apply(request);
  try {
    const Forecast f = make_forecast(request);
    return Advice{.change = change.text,
                  .setting = change.setting,
                  .seconds = f.seconds(),
                  .tokens_per_second = f.tokens_per_second(),
                  .written_per_step = f.written_per_step};
  } catch (const Error& error) {
    if (error.code() != ErrorCode::does_not_fit) throw;
    return {};
  }
}

/// Keeps those that gain, the best first.
void keep_gains(std::vector<Candidate>& list) {
  std::erase_if(list, [](const Candidate& c) { return c.outcome.gain < kWorthSaying; });
  std::ranges::stable_sort(list, std::ranges::greater{},
                           [](const Candidate& c) { return c.outcome.gain; });
}

/// Coarse outcomes against the coarse request's, those of resized chunks against its forecast.
void try_quickly(std::vector<Candidate>& list, const ForecastRequest& request,
                 const Forecast& now) {
  const ForecastRequest quick = coarse(request);
  ForecastRequest placed = request;
  placed.options = now.layout.options;
  double coarse_rate = 0;
  parallel_for(list.size() + 1, [&](uint64_t i) {
    if (i < list.size()) {
      list[i].outcome = outcome(list[i].change, list[i].resized ? placed : quick);
    } else {
      coarse_rate = outcome({"", true, [](ForecastRequest&) {}}, quick).tokens_per_second;
    }
  });
  if (coarse_rate == 0) coarse_rate = now.tokens_per_second();  // does not fit coarsely
  for (Candidate& c : list) {
    c.outcome.gain =
        c.outcome.tokens_per_second / (c.resized ? now.tokens_per_second() : coarse_rate);
  }
}

}  // namespace

std::vector<Advice> advise(const ForecastRequest& request, const Forecast& now) {
  std::vector<Candidate> list;
  for (Change& change : changes(request)) list.push_back({std::move(change)});
  for (Change& change : chunk_changes(now.layout.chunk_parameters)) {
    list.push_back({std::move(change), true});
  }
  try_quickly(list, request, now);
  keep_gains(list);
  if (list.size() > kConfirmed) list.erase(list.begin() + kConfirmed, list.end());
  parallel_for(list.size(), [&](uint64_t i) {
    list[i].outcome = outcome(list[i].change, request);
    list[i].outcome.gain = list[i].outcome.tokens_per_second / now.tokens_per_second();
  });
  keep_gains(list);
  std::vector<Advice> advice;
  for (Candidate& c : list) advice.push_back(std::move(c.outcome));
  return advice;
}

}  // namespace overspill
