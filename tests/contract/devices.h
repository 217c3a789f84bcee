// The devices that an executable's suites run on: the host as one, or an emulated GPU.
#pragma once

#include <vector>

#include "engine/train/config.h"

namespace overspill::test {

/// Defined by each executable.
bool gpu_under_test();

/// With memory apart from the host's.
inline DeviceMode discrete_device() {
  return gpu_under_test() ? DeviceMode::cuda : DeviceMode::discrete;
}
inline std::vector<DeviceMode> devices_under_test() {
  if (gpu_under_test()) return {DeviceMode::cuda};
  return {DeviceMode::unified, DeviceMode::discrete};
}

inline const char* device_name(DeviceMode device) {
  switch (device) {
    case DeviceMode::unified: return "unified";
    case DeviceMode::discrete: return "discrete";
    default: return "cuda";
  }
}

}  // namespace overspill::test
