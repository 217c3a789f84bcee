// GPUs where there are some.
#include "engine/bench/copy_devices.h"

#include "engine/base/error.h"

namespace overspill {
namespace {

/// CUDA that fails is no reason to leave the host unmeasured.
CudaGpus find_gpus() {
  try {
    return cuda_devices();
  } catch (const Error& error) {
    return {.gpus = {}, .absence = error.what()};
  }
}

}  // namespace

CopyDevices make_copy_devices(uint64_t bytes) {
  const CudaGpus found = find_gpus();
  CopyDevices result{.devices = {}, .gpu_absence = found.absence};
  for (const CudaGpu& gpu : found.gpus) {
    result.devices.push_back({.device = make_cuda_device(bytes, gpu.index), .gpu = gpu});
  }
  if (found.gpus.empty()) {
    result.devices.push_back({.device = make_host_device(bytes, /*unified=*/false)});
  }
  return result;
}

}  // namespace overspill
