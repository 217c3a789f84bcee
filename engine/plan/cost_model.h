// The cost model: how long an op of a run takes on some hardware, and which resources it uses
// meanwhile. Pure functions of a profile and a layout.
#pragma once

#include <array>

#include "engine/plan/layout.h"
#include "engine/plan/profile.h"

namespace overspill {

inline constexpr size_t kOpKinds = 15;

/// What ops share. While several run, they slow each other down where together they would use more
/// than all of a resource.
enum class Resource : uint8_t {
  drives,  ///< reads and writes of the same drives
  link,    ///< copies to and from the device
  cores,   ///< the host's processors: compute of the host device, updates, checksums
  memory,  ///< the host's memory bandwidth
};
inline constexpr size_t kResources = 4;

/// An op alone takes latency + work / rate, by its kind and the kind of its layer; work is bytes,
/// FLOPs or parameters (Op::work).
class CostModel {
 public:
  struct Rate {
    double work_per_second = 1;
    double latency_seconds = 0;
    /// Part of each resource that an op of this kind takes while it runs alone.
    std::array<double, kResources> uses{};
    double& operator[](Resource resource) { return uses[static_cast<size_t>(resource)]; }
    double operator[](Resource resource) const { return uses[static_cast<size_t>(resource)]; }
  };

  /// `head`: the model's last layer.
  explicit CostModel(uint32_t head = 0) : head_(head) {}

  Rate& at(OpKind kind, LayerKind layer) {
    return rates_[static_cast<size_t>(kind)][static_cast<size_t>(layer)];
  }
  const Rate& at(OpKind kind, LayerKind layer) const {
    return rates_[static_cast<size_t>(kind)][static_cast<size_t>(layer)];
  }
  const Rate& rate(const Op& op) const {
    const bool on_device = op.kind == OpKind::update && op.lane == Lane::compute;
    return on_device ? device_update : at(op.kind, layer_kind(op.layer));
  }
  /// Of every kind of layer.
  void set(OpKind kind, const Rate& rate) { rates_[static_cast<size_t>(kind)].fill(rate); }
  /// Of an op alone.
  double seconds(const Op& op) const {
    const Rate& r = rate(op);
    return r.latency_seconds + static_cast<double>(op.work) / r.work_per_second;
  }
  LayerKind layer_kind(uint32_t layer) const {
    return layer == 0 ? LayerKind::embedding : layer == head_ ? LayerKind::head : LayerKind::block;
  }

  Rate device_update;  ///< of updates on the compute lane

 private:
  static constexpr size_t kLayerKinds = 3;
  uint32_t head_;
  std::array<std::array<Rate, kLayerKinds>, kOpKinds> rates_{};
};

/// Of one of `ranks` ranks that run the layout's Programs on the machine at the same time: each has
/// its share of the drives, the cores and the memory's bandwidth.
CostModel cost_model(const HardwareProfile& profile, const Layout& layout, uint32_t ranks = 1);

/// The profile's rate for a layer and micro-batch, between its points in the logarithms of both
/// sizes; outside of them as the nearest. Without points: peak_flops.
double compute_rate(const DeviceProfile& device, OpKind op, double parameters, double tokens);

/// The profile's rate of a rule, else from the memory's bandwidth and the bytes that it moves.
double update_rate(const HostProfile& host, const OptimizerSettings& rule);

}  // namespace overspill
