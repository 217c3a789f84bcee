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

/// duration = latency + work / rate, by kind of op; work is bytes, FLOPs or parameters (Op::work).
struct HardwareProfile {
  struct Rate {
    double work_per_second;
    double latency_seconds;
  };
  std::array<Rate, kOpKinds> rates{};
  std::optional<DriveSettings> drives;  ///< empty: not measured

  Rate& operator[](OpKind kind) { return rates[static_cast<size_t>(kind)]; }
  const Rate& operator[](OpKind kind) const { return rates[static_cast<size_t>(kind)]; }
  double seconds(const Op& op) const {
    const Rate& rate = (*this)[op.kind];
    return rate.latency_seconds + static_cast<double>(op.work) / rate.work_per_second;
  }
};

/// A small server without accelerator: what predictions start from before anything was measured.
HardwareProfile default_profile();

}  // namespace overspill
