// The forecast as one JSON object.
#include <nlohmann/json.hpp>

#include "engine/forecast/forecast_report.h"

namespace overspill {
namespace {

using Json = nlohmann::ordered_json;

Json tier_json(const TierUse& use) {
  return {{"used", use.used},
          {"budget", use.budget == UINT64_MAX ? Json() : Json(use.budget)},
          {"weights", use.weights},
          {"optimizer", use.optimizer},
          {"gradients", use.gradients},
          {"activations", use.activations},
          {"buffers", use.buffers}};
}

Json lanes_json(const Forecast& f) {
  Json json;
  for (size_t i = 0; i < kLanes; ++i) {
    json[lane_name(static_cast<Lane>(i))] = {
        {"busy_seconds", f.summary.busy_seconds[i]},
        {"utilisation", f.summary.busy_seconds[i] / f.seconds()},
        {"bytes", f.summary.bytes[i]},
        {"compute_waits_seconds", f.summary.stall_seconds[i]}};
  }
  return json;
}

template <class T>
Json optional_json(const std::optional<T>& value) {
  return value ? Json(*value) : Json();
}

/// null where none was tried.
Json advice_json(const TriedAdvice& advice) {
  if (!advice) return {};
  Json changes = Json::array();
  for (const Advice& a : *advice) {
    changes.push_back({{"change", a.change},
                       {"setting", a.setting},
                       {"step_seconds", a.seconds},
                       {"tokens_per_second", a.tokens_per_second},
                       {"gain", a.gain},
                       {"written_per_step", a.written_per_step}});
  }
  return changes;
}

}  // namespace

std::string forecast_json(const ForecastRequest& request, const Forecast& f,
                          const TriedAdvice& advice) {
  Json tiers;
  for (const Tier tier : {Tier::device, Tier::host, Tier::nvme}) {
    tiers[tier_name(tier)] = tier_json(tier_use(f.layout, tier));
  }
  const Json json = {{"parameters", request.model.parameters()},
                     {"hardware", request.hardware.name},
                     {"ranks", request.options.world()},
                     {"micro_batches", request.options.micro_batches},
                     {"tokens_per_step", f.tokens_per_step},
                     {"prefetch_depth", f.layout.prefetch_depth},
                     {"layers_updated_twice", f.layout.layers_updated_twice().size()},
                     {"chunk_parameters", f.layout.chunk_parameters},
                     {"tiers", tiers},
                     {"step_seconds", f.seconds()},
                     {"tokens_per_second", f.tokens_per_second()},
                     {"busiest_lane", lane_name(f.bottleneck)},
                     {"lanes", lanes_json(f)},
                     {"speed_of_light", {{"seconds", f.light.seconds}, {"by", f.light.resource}}},
                     {"written_per_step", f.written_per_step},
                     {"life_days", optional_json(f.life_days)},
                     {"life_share", optional_json(f.life_share)},
                     {"load_seconds", f.load_seconds},
                     {"save_seconds", f.save_seconds},
                     {"advice", advice_json(advice)}};
  return json.dump(2) + "\n";
}

}  // namespace overspill
