// Block devices as swap files: whether one is free to be overwritten, and opening it for nobody
// else. Stateless; internal to nvme/.
#pragma once

#include <cstdint>
#include <filesystem>

#include "engine/base/fd.h"

namespace overspill::raw_device {

bool is_block_device(const std::filesystem::path& path);

/// Opens a device exclusively. Throws Error(invalid_config) when it is mounted or otherwise in use,
/// holds a file system, a partition table or another signature, or has sectors above 4096 bytes;
/// Error(does_not_fit) when it has less than `bytes`.
Fd open_exclusively(const std::filesystem::path& path, uint64_t bytes);

}  // namespace overspill::raw_device
