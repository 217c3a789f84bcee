// NVIDIA GPUs: what there is, and one of them as a Device. One process uses one GPU. Without CUDA
// in the build all of this is there and says so (offload/no_cuda.cpp); CUDA's headers are not
// needed.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "offload/device.h"

namespace overspill {

struct CudaGpu {
  uint32_t index;  ///< as CUDA counts them, after CUDA_VISIBLE_DEVICES
  std::string name;
  uint64_t memory_bytes;
  uint32_t capability_major, capability_minor;
  std::string pci;              ///< "0000:01:00.0", in lower case
  std::vector<uint32_t> peers;  ///< indices of GPUs whose memory it reaches directly

  bool operator==(const CudaGpu&) const = default;
};

struct CudaGpus {
  std::vector<CudaGpu> gpus;
  std::string absence;  ///< why there is none, and what to do; empty where there are some
};

/// Starts no context, so takes no memory of GPUs. Throws Error(io) when CUDA fails.
CudaGpus cuda_devices();

/// The GPU of a rank by its number on this host (LOCAL_RANK): the GPU of that number, or the only
/// one where the launcher gives each rank its own by CUDA_VISIBLE_DEVICES. Throws
/// Error(invalid_config) when there are too few.
uint32_t gpu_of_local_rank(uint32_t local_rank);

/// Makes the GPU the calling thread's, for libraries of NVIDIA. Throws Error(not_found) without
/// one.
void use_gpu(uint32_t gpu);

/// Of a GPU's memory a 64th stays free: kernels' code is loaded at their first launch, and
/// libraries have buffers.
inline constexpr uint64_t kKeptGpuPart = 64;

struct GpuMemory {
  uint64_t free, total;  ///< bytes
};
/// As CUDA sees it now, less the part that is kept.
GpuMemory gpu_memory(uint32_t gpu);

class CudaDevice : public Device {
 public:
  uint32_t gpu() const { return gpu_; }
  /// Makes the GPU the calling thread's.
  virtual void use() = 0;
  /// The cudaStream_t for kernels and libraries; makes the GPU the calling thread's.
  virtual void* native_stream(DeviceStream stream) = 0;

  // Streams of another program on this GPU (cudaStream_t; null is its default stream). Any thread.

  virtual void record_on(void* stream, DeviceEvent& event) = 0;
  /// As wait(): what the program puts on the stream from now on begins later.
  virtual void wait_on(void* stream, DeviceEvent& event) = 0;
  virtual void zero_on(void* stream, std::byte* device, uint64_t bytes) = 0;
  /// Between any two places that reaches() is true of.
  virtual void copy_on(void* stream, void* to, const void* from, uint64_t bytes) = 0;
  /// Whether kernels and asynchronous copies of this GPU can use the memory: its own, managed, or
  /// pinned.
  virtual bool reaches(const void* memory) = 0;

 protected:
  CudaDevice(std::string name, uint32_t gpu) : Device(std::move(name), false), gpu_(gpu) {}

 private:
  uint32_t gpu_;
};

/// Puts the calling thread's GPU back at the end of a scope: it is another program's.
class GpuScope {
 public:
  /// `uses_gpus`: else nothing changes it.
  explicit GpuScope(bool uses_gpus);
  ~GpuScope();
  GpuScope(const GpuScope&) = delete;
  GpuScope& operator=(const GpuScope&) = delete;

 private:
  int before_ = -1;
};

/// Keeps host memory pinned for all GPUs, whatever device uses it. Destroyed before the memory is
/// freed, when no GPU uses it any more. Move-only.
class PinnedMemory {
 public:
  PinnedMemory() = default;
  /// Throws Error(does_not_fit) when the system refuses.
  PinnedMemory(std::span<std::byte> host, uint32_t gpu);
  PinnedMemory(PinnedMemory&& other) noexcept : memory_(std::exchange(other.memory_, nullptr)) {}
  PinnedMemory& operator=(PinnedMemory&& other) noexcept {
    std::swap(memory_, other.memory_);
    return *this;
  }
  ~PinnedMemory();

 private:
  std::byte* memory_ = nullptr;
};

/// Allocates all memory and streams of the run. Throws Error(not_found) without a GPU,
/// Error(invalid_config) without this one, Error(does_not_fit) with the numbers when it has not so
/// much memory free, Error(io) when CUDA fails.
std::unique_ptr<CudaDevice> make_cuda_device(uint64_t bytes, uint32_t gpu);

}  // namespace overspill
