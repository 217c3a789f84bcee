// Each change is a function of the request.
#include "engine/forecast/advice.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>

#include "engine/base/error.h"

namespace overspill {
namespace {

constexpr double kWorthSaying = 1.01;
/// Programs of more chunks say no more about a step's time.
constexpr uint64_t kFineChunks = 2048;
constexpr double kQuickSearch = 0.3;  // of a run's own search: there are eight of them

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

/// The request with chunks so large that planning takes little.
ForecastRequest coarse(ForecastRequest request) {
  if (request.options.chunk_parameters) return request;
  const uint64_t share = request.model.parameters() / request.options.ranks / kFineChunks;
  constexpr uint64_t kDefaultMost = uint64_t{4} << 20;
  if (share > kDefaultMost) {
    request.options.chunk_parameters = share / kParameterAlignment * kParameterAlignment;
    request.search_effort = kQuickSearch;
  }
  return request;
}

}  // namespace

std::vector<Advice> advise(const ForecastRequest& request) {
  const ForecastRequest base = coarse(request);
  const double now = make_forecast(base).tokens_per_second();
  std::vector<Advice> list;
  for (const Change& change : changes(base)) {
    ForecastRequest changed = base;
    change.apply(changed);
    try {
      const Forecast f = make_forecast(changed);
      const double gain = f.tokens_per_second() / now;
      if (gain < kWorthSaying) continue;
      list.push_back({change.text, change.setting, f.seconds(), f.tokens_per_second(), gain,
                      f.written_per_step});
    } catch (const Error& error) {
      if (error.code() != ErrorCode::does_not_fit) throw;
    }
  }
  std::ranges::sort(list, std::ranges::greater{}, &Advice::gain);
  return list;
}

}  // namespace overspill
