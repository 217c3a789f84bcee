// Times of ops from a machine's profile.
#include "engine/plan/cost_model.h"

#include <algorithm>
#include <cmath>
#include <map>

namespace overspill {
namespace {

using Rate = CostModel::Rate;

/// Straight between neighbours, flat outside.
double interpolate(const std::map<double, double>& points, double x) {
  const auto above = points.lower_bound(x);
  if (above == points.begin()) return above->second;
  const auto below = std::prev(above);
  if (above == points.end()) return below->second;
  const double part = (x - below->first) / (above->first - below->first);
  return below->second + part * (above->second - below->second);
}

/// Bytes that an update reads and writes per parameter: weight, state and gradient.
double update_bytes(const OptimizerSettings& rule) {
  constexpr uint64_t kMany = 1 << 20;
  const double state = static_cast<double>(state_layout(rule, kMany, 0).bytes) / kMany;
  const double weight = rule.master == MasterFormat::split ? 2 : 4;
  return 2 * (weight + state) + weight;
}

class Costs {
 public:
  Costs(const HardwareProfile& profile, const Layout& layout, uint32_t ranks)
      : profile_(profile), layout_(layout), share_(1.0 / ranks), costs_(layout.model.head()) {}

  CostModel run() {
    set_drives();
    set_link();
    set_compute();
    set_updates();
    const CollectiveProfile& c = profile_.collective;
    costs_.set(OpKind::all_gather, {c.all_gather, c.latency});
    costs_.set(OpKind::reduce_scatter, {c.reduce_scatter, c.latency});
    costs_.set(OpKind::all_reduce, {c.reduce_scatter, c.latency});
    costs_.set(OpKind::agree, {c.reduce_scatter, c.latency});
    return costs_;
  }

 private:
  /// Of all ranks' bytes per second at once.
  double memory_use(double bytes_per_second) const {
    return std::min(1.0, bytes_per_second / (share_ * profile_.host.memory_bandwidth));
  }

  /// Two flows that each take so much of a resource run at the measured share of their own speeds.
  static double shared_use(double mixed_a, double a, double mixed_b, double b) {
    return std::clamp(1.0 / (mixed_a / a + mixed_b / b), 0.5, 1.0);
  }

  void set_drives() {
    const DrivesProfile& d = profile_.drives;
    const double use = shared_use(d.mixed_read, d.read, d.mixed_write, d.write);
    for (const OpKind kind : {OpKind::read, OpKind::write}) {
      Rate rate{share_ * (kind == OpKind::read ? d.read : d.write), d.latency};
      rate[Resource::drives] = use;
      rate[Resource::memory] = memory_use(rate.work_per_second);
      const double cores = share_ * profile_.host.cores;
      rate[Resource::cores] =
          std::min(1.0, d.cpu_seconds_per_gb * rate.work_per_second * 1e-9 / cores);
      costs_.set(kind, rate);
    }
  }

  void set_link() {
    const LinkProfile& l = profile_.link;
    const double use = shared_use(l.both_h2d, l.h2d, l.both_d2h, l.d2h);
    for (const OpKind kind : {OpKind::copy_to_device, OpKind::copy_to_host}) {
      const bool up = kind == OpKind::copy_to_device;
      const double alone = up ? l.h2d : l.d2h, all = up ? l.all_h2d : l.all_d2h;
      Rate rate{all > 0 ? std::min(alone, share_ * all) : alone, l.latency};
      rate[Resource::link] = use;
      // A copy within host memory reads and writes it, by a core.
      const bool host = !profile_.device.accelerator;
      rate[Resource::memory] = memory_use((host ? 2 : 1) * rate.work_per_second);
      if (host) rate[Resource::cores] = std::min(1.0, 1 / (share_ * profile_.host.cores));
      costs_.set(kind, rate);
    }
  }

  void on_device(OpKind kind, LayerKind layer, Rate rate) {
    if (!profile_.device.accelerator) {
      rate.work_per_second *= share_;
      rate[Resource::cores] = 1;
    }
    costs_.at(kind, layer) = rate;
  }

  void set_compute() {
    const ModelShape& model = layout_.model;
    const PlanOptions& o = layout_.options;
    const auto tokens = static_cast<double>(o.micro_batch_tokens);
    const DeviceProfile& device = profile_.device;
    for (const uint32_t layer : {0u, 1u, model.head()}) {
      const LayerKind kind = costs_.layer_kind(layer);
      const auto flops =
          static_cast<double>(forward_flops(model, layer, o.micro_batch_tokens, o.sequence_len));
      for (const OpKind op : {OpKind::forward, OpKind::backward, OpKind::loss, OpKind::score}) {
        const OpKind like = op == OpKind::score ? OpKind::forward : op;
        on_device(op, kind, {compute_rate(device, like, flops / (2 * tokens), tokens), kLaunch});
      }
      on_device(OpKind::reduce_gradient, kind, {device.reduce_gradient, kLaunch});
      on_device(OpKind::export_gradient, kind, {device.export_gradient, kLaunch});
    }
    // The embedding looks rows up, and its backward sets all sums to zero before it adds to few.
    const double bandwidth = device.memory_bandwidth > 0 ? device.memory_bandwidth
                                                         : share_ * profile_.host.memory_bandwidth;
    const auto hidden = static_cast<double>(model.config.hidden_size);
    Rate& look_up = costs_.at(OpKind::forward, LayerKind::embedding);
    look_up.latency_seconds += tokens * hidden * (o.weight_bytes() + 4.0) / bandwidth;
    Rate& scatter = costs_.at(OpKind::backward, LayerKind::embedding);
    const double zeros = 4.0 * static_cast<double>(model.layers[0].padded) / o.micro_batches;
    scatter.latency_seconds += (tokens * hidden * 12.0 + zeros) / bandwidth;
  }

  void set_updates() {
    const OptimizerSettings rule = layout_.options.update_rule();
    Rate rate{share_ * update_rate(profile_.host, rule), profile_.host.update_latency};
    rate[Resource::memory] = memory_use(update_bytes(rule) * rate.work_per_second);
    if (!profile_.device.accelerator) rate[Resource::cores] = 1;
    costs_.set(OpKind::update, rate);
    costs_.device_update = rate;
    if (profile_.device.memory_bandwidth > 0) {
      costs_.device_update = {kKernelShare * profile_.device.memory_bandwidth / update_bytes(rule),
                              kLaunch};
    }
  }

  static constexpr double kLaunch = 1e-5;      // seconds of a kernel's launch
  static constexpr double kKernelShare = 0.8;  // of the device memory's rate, streaming kernels

  const HardwareProfile& profile_;
  const Layout& layout_;
  const double share_;
  CostModel costs_;
};

}  // namespace

double compute_rate(const DeviceProfile& device, OpKind op, double parameters, double tokens) {
  std::map<double, std::map<double, double>> grid;  // of logarithms
  for (const ComputePoint& p : device.compute) {
    if (p.op == op) grid[std::log(p.parameters)][std::log(p.tokens)] = std::log(p.flops_per_second);
  }
  if (grid.empty()) return device.peak_flops;
  std::map<double, double> by_parameters;
  for (const auto& [size, points] : grid) {
    by_parameters[size] = interpolate(points, std::log(tokens));
  }
  return std::exp(interpolate(by_parameters, std::log(std::max(1.0, parameters))));
}

double update_rate(const HostProfile& host, const OptimizerSettings& rule) {
  for (const UpdateRate& rate : host.updates) {
    if (rate.optimizer == rule.kind && rate.state == rule.state) return rate.parameters_per_second;
  }
  return host.memory_bandwidth / update_bytes(rule);
}

CostModel cost_model(const HardwareProfile& profile, const Layout& layout, uint32_t ranks) {
  return Costs(profile, layout, ranks).run();
}

}  // namespace overspill
