// What a machine can do, as measured by `overspill bench` or as published: the drives, the links,
// the devices, the host, the collectives. Pure data; cost_model.h turns it into times of ops.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "engine/program/program.h"
#include "optim/optimizer.h"

namespace overspill {

/// How the drives like to be asked, as `overspill bench nvme` found it.
struct DriveSettings {
  uint64_t block_bytes = 0;
  uint32_t read_depth = 0, write_depth = 0;  ///< requests in flight per drive while both run
  bool operator==(const DriveSettings&) const = default;
};

/// All drives of a run together. Rates are bytes per second of pages, as training moves them.
struct DrivesProfile {
  uint32_t count = 1;
  double read = 2.5e9, write = 2.5e9;              ///< each alone
  double mixed_read = 1.7e9, mixed_write = 1.7e9;  ///< both at once
  double latency = 1e-4;                           ///< seconds of a page, besides its bytes
  double cpu_seconds_per_gb = 0;                   ///< of the lane's thread, with checksums
  uint64_t capacity = 0;                           ///< bytes; 0: unknown
  uint64_t endurance = 0;                   ///< bytes that may be written in their life; 0: unknown
  std::optional<DriveSettings> settings{};  ///< empty: not measured
  bool operator==(const DrivesProfile&) const = default;
};

/// Between host memory and one device, bytes per second.
struct LinkProfile {
  double h2d = 10e9, d2h = 10e9;            ///< one direction, one device
  double both_h2d = 10e9, both_d2h = 10e9;  ///< both directions at once
  double all_h2d = 0, all_d2h = 0;          ///< sum over all devices at once; 0: as each alone
  double latency = 1e-5;
  bool operator==(const LinkProfile&) const = default;
};

/// FLOP/s of one kind of op (forward, backward or loss), on layers of a size with micro-batches of
/// a size. FLOPs as forward_flops() and backward_flops() count them.
struct ComputePoint {
  OpKind op = OpKind::forward;
  double parameters = 0;  ///< of the layer
  double tokens = 0;      ///< of a micro-batch
  double flops_per_second = 0;
  bool operator==(const ComputePoint&) const = default;
};

/// FLOP/s of a product of bf16 matrices: [m, k] times [k, n], with float32 sums.
struct GemmPoint {
  uint64_t m = 0, n = 0, k = 0;
  double flops_per_second = 0;
  bool operator==(const GemmPoint&) const = default;
};

/// The devices that compute; all alike. Without an accelerator: the host's cores.
struct DeviceProfile {
  std::string name = "host";
  uint32_t count = 1;
  bool accelerator = false;     ///< else computing takes the host's cores and memory
  uint64_t memory = 0;          ///< bytes of each; 0: unknown, or shared with the host
  double memory_bandwidth = 0;  ///< bytes/s of each; 0: unknown
  double peak_flops = 1e11;     ///< dense bf16 with float32 sums, of each
  std::vector<ComputePoint> compute{};
  std::vector<GemmPoint> gemm{};
  double reduce_gradient = 4e9;  ///< float32 elements per second
  double export_gradient = 2e9;
  bool operator==(const DeviceProfile&) const = default;
};

/// Parameters per second of an update rule on the host, with all of its cores.
struct UpdateRate {
  OptimizerKind optimizer = OptimizerKind::adamw;
  StateFormat state = StateFormat::float32;
  double parameters_per_second = 0;
  bool operator==(const UpdateRate&) const = default;
};

struct HostProfile {
  uint64_t memory = 0;             ///< bytes; 0: unknown
  double memory_bandwidth = 4e10;  ///< bytes/s read and written together, all nodes
  uint32_t cores = 2;
  std::vector<std::vector<uint32_t>> numa_distances{};  ///< of the nodes; empty: one node
  std::vector<UpdateRate> updates{};
  double update_latency = 1e-5;  ///< seconds of a chunk, besides its parameters
  bool operator==(const HostProfile&) const = default;
};

/// Of one rank when all take part: bytes that it receives (all_gather) or sends (reduce_scatter).
struct CollectiveProfile {
  double all_gather = 5e9, reduce_scatter = 5e9;
  double latency = 5e-5;
  bool operator==(const CollectiveProfile&) const = default;
};

/// The defaults are those of a small server without accelerator: two cores and a mid-range drive.
struct HardwareProfile {
  std::string name;
  std::vector<std::string> sources;  ///< where the figures come from
  DeviceProfile device;
  LinkProfile link;
  HostProfile host;
  DrivesProfile drives;
  CollectiveProfile collective;
  bool operator==(const HardwareProfile&) const = default;
};

}  // namespace overspill
