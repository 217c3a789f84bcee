// How fast drives are beside each other, measured with a small volume on each, so that faster ones
// take more stripes. Takes about a second.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <vector>

#include "nvme/volume.h"

namespace overspill {

/// Bytes per second that each drive reads and writes, half each, all drives at the same time. Uses
/// and removes swap files of `bytes` each. Throws Error as Volume does.
std::vector<double> measure_drives(const VolumeOptions& volume, const IoOptions& io,
                                   uint64_t bytes = uint64_t{128} << 20);

/// Small numbers in proportion to the rates; all 1 when they are within 15 % of each other.
std::vector<uint32_t> shares_of(std::span<const double> rates);

}  // namespace overspill
