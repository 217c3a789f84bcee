// The list of GPUs, or the reason why there is none; which of them is a rank's.
#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <string>

#include "engine/base/error.h"
#include "offload/cuda_device.h"
#include "offload/cuda_error.h"
#include "offload/cuda_library.h"

namespace overspill {
namespace {

std::string version_text(int version) {
  return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

std::string driver_absence(const CudaLibrary& cuda) {
  int driver = 0, runtime = 0;
  cuda.cudaDriverGetVersion(&driver);
  cuda.cudaRuntimeGetVersion(&runtime);
  cuda.cudaGetLastError();
  if (driver == 0) {
    return "no NVIDIA driver: libcuda.so.1 is not there; install the driver, or start the "
           "container with its GPUs (`--gpus all`)";
  }
  return fmt::format(
      "the NVIDIA driver is too old: it serves CUDA {}, and the runtime is CUDA {}; update the "
      "driver",
      version_text(driver), version_text(runtime));
}

CudaGpu read_gpu(const CudaLibrary& cuda, int index, int count) {
  cudaDeviceProp properties{};
  cuda_check(cuda, cuda.cudaGetDeviceProperties(&properties, index), "read properties of GPU {}",
             index);
  char pci[32] = {};
  cuda_check(cuda, cuda.cudaDeviceGetPCIBusId(pci, sizeof pci, index),
             "read the PCI address of GPU {}", index);
  CudaGpu gpu{.index = static_cast<uint32_t>(index),
              .name = properties.name,
              .memory_bytes = properties.totalGlobalMem,
              .capability_major = static_cast<uint32_t>(properties.major),
              .capability_minor = static_cast<uint32_t>(properties.minor),
              .pci = pci,
              .peers = {}};
  std::ranges::transform(gpu.pci, gpu.pci.begin(),
                         [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  for (int other = 0; other < count; ++other) {
    if (other == index) continue;
    int reachable = 0;
    cuda_check(cuda, cuda.cudaDeviceCanAccessPeer(&reachable, index, other),
               "ask whether GPU {} reaches GPU {}", index, other);
    if (reachable) gpu.peers.push_back(static_cast<uint32_t>(other));
  }
  return gpu;
}

}  // namespace

CudaGpus cuda_devices() {
  CudaLibrary cuda;
  try {
    cuda = open_cuda_library();
  } catch (const Error& error) {
    return {.gpus = {}, .absence = error.what()};
  }
  int count = 0;
  const cudaError_t status = cuda.cudaGetDeviceCount(&count);
  if (status == cudaErrorInsufficientDriver || status == cudaErrorStubLibrary) {
    return {.gpus = {}, .absence = driver_absence(cuda)};
  }
  if (status == cudaErrorNoDevice || (status == cudaSuccess && count == 0)) {
    cuda.cudaGetLastError();
    return {.gpus = {},
            .absence =
                "the NVIDIA driver shows no GPU to this process; see `nvidia-smi` and "
                "CUDA_VISIBLE_DEVICES"};
  }
  cuda_check(cuda, status, "count the GPUs");
  CudaGpus found;
  for (int i = 0; i < count; ++i) found.gpus.push_back(read_gpu(cuda, i, count));
  return found;
}

uint32_t gpu_of_local_rank(uint32_t local_rank) {
  const CudaGpus found = cuda_devices();
  if (found.gpus.empty()) {
    fail(ErrorCode::not_found, "no GPU for local rank {}: {}", local_rank, found.absence);
  }
  if (local_rank < found.gpus.size()) return local_rank;
  const char* const visible = std::getenv("CUDA_VISIBLE_DEVICES");
  if (found.gpus.size() == 1 && visible && *visible) return 0;
  fail(ErrorCode::invalid_config,
       "no GPU for local rank {}: this host shows {} to it, and each rank needs one of its own; "
       "start at most {} ranks on this host, or let its ranks see more in CUDA_VISIBLE_DEVICES",
       local_rank, found.gpus.size(), found.gpus.size());
}

void use_gpu(uint32_t gpu) {
  const CudaGpus found = cuda_devices();
  if (found.gpus.empty()) fail(ErrorCode::not_found, "no GPU {}: {}", gpu, found.absence);
  const CudaLibrary cuda = open_cuda_library();
  cuda_check(cuda, cuda.cudaSetDevice(static_cast<int>(gpu)), "use GPU {}", gpu);
  // Threads that wait sleep: the cores are for the host's share of the work.
  cuda_check(cuda, cuda.cudaSetDeviceFlags(cudaDeviceScheduleBlockingSync),
             "start the context on GPU {}", gpu);
}

GpuMemory gpu_memory(uint32_t gpu) {
  use_gpu(gpu);
  const CudaLibrary cuda = open_cuda_library();
  size_t free = 0, total = 0;
  cuda_check(cuda, cuda.cudaMemGetInfo(&free, &total), "read the free memory of GPU {}", gpu);
  const uint64_t kept = total / kKeptGpuPart;
  return {free > kept ? free - kept : 0, total};
}

}  // namespace overspill
