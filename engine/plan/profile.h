// The cost model: how long an op takes on some hardware. Pure data.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "engine/program/program.h"

namespace overspill {

inline constexpr size_t kOpKinds = 11;

/// How the drives like to be asked, as `overspill bench nvme` found it.
struct DriveSettings {
  uint64_t block_bytes = 0;
  uint32_t read_depth = 0, write_depth = 0;  ///< requests in flight per drive while both run
  bool operator==(const DriveSettings&) const = default;
};

/// What ops share. While several run, they slow each other down where together they would use more
/// than all of a resource.
enum class Resource : uint8_t {
  drives,  ///< reads and writes of the same drives
  link,    ///< copies to and from the device (PCIe, or a root complex of several devices)
  cores,   ///< the host's processors: compute of the host device, updates, checksums
  memory,  ///< the host's memory bandwidth
};
inline constexpr size_t kResources = 4;

/// An op alone takes latency + work / rate, by kind; work is bytes, FLOPs or parameters (Op::work).
struct HardwareProfile {
  struct Rate {
    double work_per_second;
    double latency_seconds;
    /// Part of each resource that an op of this kind takes while it runs alone.
    std::array<double, kResources> uses{};
    double& operator[](Resource resource) { return uses[static_cast<size_t>(resource)]; }
    double operator[](Resource resource) const { return uses[static_cast<size_t>(resource)]; }
  };
  std::array<Rate, kOpKinds> rates{};
  std::optional<DriveSettings> drives;  ///< empty: not measured

  Rate& operator[](OpKind kind) { return rates[static_cast<size_t>(kind)]; }
  const Rate& operator[](OpKind kind) const { return rates[static_cast<size_t>(kind)]; }
  /// Of an op alone.
  double seconds(const Op& op) const {
    const Rate& rate = (*this)[op.kind];
    return rate.latency_seconds + static_cast<double>(op.work) / rate.work_per_second;
  }
};

/// A small server without accelerator: what predictions start from before anything was measured.
HardwareProfile default_profile();

}  // namespace overspill
