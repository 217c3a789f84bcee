// The devices that copies are measured with: every GPU of the machine, or the host as one.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "offload/cuda_device.h"
#include "offload/device.h"

namespace overspill {

struct CopyDevice {
  std::unique_ptr<Device> device;
  std::optional<CudaGpu> gpu{};  ///< empty: the host, whose copies are its threads' own work
};

struct CopyDevices {
  std::vector<CopyDevice> devices;
  std::string gpu_absence;  ///< why there is no GPU; empty where there are some
};

/// Devices that are not unified with the host, each with so many bytes of memory.
using CopyDeviceMaker = std::function<CopyDevices(uint64_t bytes)>;

/// Throws Error(does_not_fit) when a GPU has not so much memory free.
CopyDevices make_copy_devices(uint64_t bytes);

}  // namespace overspill
