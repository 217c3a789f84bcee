// A GPU through the CUDA runtime: one allocation, four streams that do not block each other, events
// without times. All statuses are checked; only destructors go on after an error.
#include "offload/cuda_device.h"

#include <algorithm>
#include <array>

#include "engine/base/error.h"
#include "engine/base/units.h"
#include "offload/cuda_error.h"
#include "offload/cuda_library.h"

namespace overspill {
namespace {

/// False where another device has pinned it, for all GPUs.
bool pin_host(const CudaLibrary& cuda, std::span<std::byte> host, const std::string& where) {
  const cudaError_t status =
      cuda.cudaHostRegister(host.data(), host.size(), cudaHostRegisterPortable);
  if (status == cudaErrorHostMemoryAlreadyRegistered) {
    cuda.cudaGetLastError();
    return false;
  }
  if (status == cudaErrorMemoryAllocation || status == cudaErrorOperatingSystem) {
    const char* const reason = cuda.cudaGetErrorString(status);
    cuda.cudaGetLastError();
    fail(ErrorCode::does_not_fit,
         "host memory: the driver cannot pin {} for {}: {}; raise the limit of locked memory "
         "(`ulimit -l unlimited`) or lower offload.host_memory",
         format_bytes(host.size()), where, reason);
  }
  cuda_check(cuda, status, "pin {} bytes of host memory for {}", host.size(), where);
  return true;
}

class CudaEvent final : public DeviceEvent {
 public:
  explicit CudaEvent(const CudaLibrary& cuda) : cuda_(cuda) {
    cuda_check(
        cuda_,
        cuda_.cudaEventCreateWithFlags(&event_, cudaEventDisableTiming | cudaEventBlockingSync),
        "create an event");
  }
  ~CudaEvent() override { cuda_.cudaEventDestroy(event_); }
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;

  bool done() override {
    const cudaError_t status = cuda_.cudaEventQuery(event_);
    if (status == cudaErrorNotReady) return false;
    cuda_check(cuda_, status, "finish the work before an event");
    return true;
  }
  void synchronize() override {
    cuda_check(cuda_, cuda_.cudaEventSynchronize(event_), "finish the work before an event");
  }
  cudaEvent_t handle() const { return event_; }

 private:
  const CudaLibrary& cuda_;
  cudaEvent_t event_ = nullptr;
};

class Gpu final : public CudaDevice {
 public:
  Gpu(const CudaLibrary& cuda, const CudaGpu& gpu, uint64_t bytes);
  ~Gpu() override;

  std::unique_ptr<DeviceEvent> make_event() override {
    use();
    return std::make_unique<CudaEvent>(cuda_);
  }
  void record(DeviceEvent& event, DeviceStream stream) override;
  void wait(DeviceStream stream, DeviceEvent& event) override;
  void launch_host_function(DeviceStream stream, void (*function)(void*), void* argument) override;
  void synchronize(DeviceStream stream) override;
  void use() override;
  void* native_stream(DeviceStream stream) override {
    use();
    return at(stream);
  }
  void record_on(void* stream, DeviceEvent& event) override;
  void wait_on(void* stream, DeviceEvent& event) override;
  void zero_on(void* stream, std::byte* device, uint64_t bytes) override;
  void copy_on(void* stream, void* to, const void* from, uint64_t bytes) override;
  bool reaches(const void* memory) override;

 private:
  cudaStream_t at(DeviceStream stream) const { return streams_[static_cast<size_t>(stream)]; }
  void make_streams();
  void allocate(uint64_t bytes);
  void release() noexcept;
  void pin(std::span<std::byte> host) override;
  void unpin(std::span<std::byte> host) noexcept override;
  void put_copy(DeviceStream stream, std::byte* to, const std::byte* from, uint64_t bytes) override;
  void copy_now(DeviceStream stream, std::byte* to, const std::byte* from, uint64_t bytes,
                bool pinned) override;
  cudaMemcpyKind kind(const std::byte* to, const std::byte* from) const;

  const CudaLibrary cuda_;
  const std::string where_;  ///< "GPU 0 (NVIDIA H200)"
  std::array<cudaStream_t, kDeviceStreams> streams_{};
  std::vector<const std::byte*> pinned_;  ///< registrations that are this device's own
};

Gpu::Gpu(const CudaLibrary& cuda, const CudaGpu& gpu, uint64_t bytes)
    : CudaDevice(gpu.name, gpu.index),
      cuda_(cuda),
      where_(fmt::format("GPU {} ({})", gpu.index, gpu.name)) {
  use();
  // Threads that wait sleep: the cores are for the host's share of the work.
  cuda_check(cuda_, cuda_.cudaSetDeviceFlags(cudaDeviceScheduleBlockingSync),
             "start the context on {}", where_);
  try {
    make_streams();
    allocate(bytes);
  } catch (...) {
    release();
    throw;
  }
}

/// CUDA keeps the GPU in use for each thread. When it is lost, the call that follows says so, and
/// what it was to do.
void Gpu::use() {
  const cudaError_t status = cuda_.cudaSetDevice(static_cast<int>(gpu()));
  if (!cuda_error_is_sticky(status)) cuda_check(cuda_, status, "use {}", where_);
}

/// Copies and collectives go before compute wherever both could run: compute waits for them.
void Gpu::make_streams() {
  int least = 0, greatest = 0;
  cuda_check(cuda_, cuda_.cudaDeviceGetStreamPriorityRange(&least, &greatest),
             "read the priorities of streams on {}", where_);
  for (size_t i = 0; i < kDeviceStreams; ++i) {
    const auto stream = static_cast<DeviceStream>(i);
    const int priority = stream == DeviceStream::compute ? least : greatest;
    cuda_check(cuda_,
               cuda_.cudaStreamCreateWithPriority(&streams_[i], cudaStreamNonBlocking, priority),
               "create the {} stream on {}", device_stream_name(stream), where_);
  }
}

void Gpu::allocate(uint64_t bytes) {
  if (bytes == 0) return;
  size_t free = 0, total = 0;
  cuda_check(cuda_, cuda_.cudaMemGetInfo(&free, &total), "read the free memory of {}", where_);
  const uint64_t kept = total / kKeptGpuPart;
  void* memory = nullptr;
  const cudaError_t status = free < kept || bytes > free - kept ? cudaErrorMemoryAllocation
                                                                : cuda_.cudaMalloc(&memory, bytes);
  if (status == cudaErrorMemoryAllocation) {
    cuda_.cudaGetLastError();
    fail(
        ErrorCode::does_not_fit,
        "device memory: the run needs {} in one piece, and {} for CUDA's own use, on {}, which has "
        "{} free of {}; lower offload.device_memory so that more lives in host memory, or end "
        "other programs on the GPU (see `nvidia-smi`)",
        format_bytes(bytes), format_bytes(kept), where_, format_bytes(free), format_bytes(total));
  }
  cuda_check(cuda_, status, "allocate {} bytes on {}", bytes, where_);
  set_memory({static_cast<std::byte*>(memory), bytes});
  cuda_check(cuda_, cuda_.cudaMemsetAsync(memory, 0, bytes, at(DeviceStream::compute)),
             "clear {} bytes on {}", bytes, where_);
  synchronize(DeviceStream::compute);
}

void Gpu::release() noexcept {
  cuda_.cudaSetDevice(static_cast<int>(gpu()));
  for (const cudaStream_t stream : streams_) {
    if (stream) cuda_.cudaStreamSynchronize(stream);
  }
  for (const cudaStream_t stream : streams_) {
    if (stream) cuda_.cudaStreamDestroy(stream);
  }
  if (memory()) cuda_.cudaFree(memory());
}

Gpu::~Gpu() { release(); }

void Gpu::record(DeviceEvent& event, DeviceStream stream) {
  use();
  cuda_check(cuda_,
             cuda_.cudaEventRecord(static_cast<const CudaEvent&>(event).handle(), at(stream)),
             "record an event on the {} stream of {}", device_stream_name(stream), where_);
}

void Gpu::wait(DeviceStream stream, DeviceEvent& event) {
  use();
  cuda_check(cuda_,
             cuda_.cudaStreamWaitEvent(at(stream), static_cast<const CudaEvent&>(event).handle(),
                                       cudaEventWaitDefault),
             "let the {} stream of {} wait for an event", device_stream_name(stream), where_);
}

void Gpu::record_on(void* stream, DeviceEvent& event) {
  use();
  cuda_check(cuda_,
             cuda_.cudaEventRecord(static_cast<const CudaEvent&>(event).handle(),
                                   static_cast<cudaStream_t>(stream)),
             "record an event on a stream of the program on {}", where_);
}

void Gpu::wait_on(void* stream, DeviceEvent& event) {
  use();
  cuda_check(cuda_,
             cuda_.cudaStreamWaitEvent(static_cast<cudaStream_t>(stream),
                                       static_cast<const CudaEvent&>(event).handle(),
                                       cudaEventWaitDefault),
             "let a stream of the program on {} wait for an event", where_);
}

void Gpu::zero_on(void* stream, std::byte* device, uint64_t bytes) {
  CHECK(in_memory(device, bytes));
  use();
  cuda_check(cuda_, cuda_.cudaMemsetAsync(device, 0, bytes, static_cast<cudaStream_t>(stream)),
             "clear {} bytes on a stream of the program on {}", bytes, where_);
}

void Gpu::copy_on(void* stream, void* to, const void* from, uint64_t bytes) {
  use();
  cuda_check(
      cuda_,
      cuda_.cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, static_cast<cudaStream_t>(stream)),
      "copy {} bytes on a stream of the program on {}", bytes, where_);
}

bool Gpu::reaches(const void* memory) {
  use();
  cudaPointerAttributes found{};
  const cudaError_t status = cuda_.cudaPointerGetAttributes(&found, memory);
  if (status == cudaErrorInvalidValue) {  // no memory that CUDA knows
    cuda_.cudaGetLastError();
    return false;
  }
  cuda_check(cuda_, status, "find out where memory lies");
  if (found.type == cudaMemoryTypeDevice) return found.device == static_cast<int>(gpu());
  return found.type != cudaMemoryTypeUnregistered;
}

void Gpu::launch_host_function(DeviceStream stream, void (*function)(void*), void* argument) {
  use();
  cuda_check(cuda_, cuda_.cudaLaunchHostFunc(at(stream), function, argument),
             "put a host function on the {} stream of {}", device_stream_name(stream), where_);
}

void Gpu::synchronize(DeviceStream stream) {
  use();
  cuda_check(cuda_, cuda_.cudaStreamSynchronize(at(stream)),
             "finish the work on the {} stream of {}", device_stream_name(stream), where_);
}

void Gpu::pin(std::span<std::byte> host) {
  use();
  if (pin_host(cuda_, host, where_)) pinned_.push_back(host.data());
}

void Gpu::unpin(std::span<std::byte> host) noexcept {
  cuda_.cudaSetDevice(static_cast<int>(gpu()));
  for (const cudaStream_t stream : streams_) cuda_.cudaStreamSynchronize(stream);
  if (std::erase(pinned_, host.data()) == 0) return;
  if (cuda_.cudaHostUnregister(host.data()) != cudaSuccess) cuda_.cudaGetLastError();
}

cudaMemcpyKind Gpu::kind(const std::byte* to, const std::byte* from) const {
  if (!in_memory(to, 1)) return cudaMemcpyDeviceToHost;
  return in_memory(from, 1) ? cudaMemcpyDeviceToDevice : cudaMemcpyHostToDevice;
}

void Gpu::put_copy(DeviceStream stream, std::byte* to, const std::byte* from, uint64_t bytes) {
  use();
  cuda_check(cuda_, cuda_.cudaMemcpyAsync(to, from, bytes, kind(to, from), at(stream)),
             "copy {} bytes on the {} stream of {}", bytes, device_stream_name(stream), where_);
}

void Gpu::copy_now(DeviceStream stream, std::byte* to, const std::byte* from, uint64_t bytes,
                   bool pinned) {
  if (pinned) {
    put_copy(stream, to, from, bytes);
    return synchronize(stream);
  }
  synchronize(stream);
  cuda_check(cuda_, cuda_.cudaMemcpy(to, from, bytes, kind(to, from)),
             "copy {} bytes of pageable memory with {}", bytes, where_);
  // From pageable memory the call returns before the last bytes have reached the GPU.
  cuda_check(cuda_, cuda_.cudaStreamSynchronize(cudaStreamLegacy),
             "finish a copy of pageable memory with {}", where_);
}

}  // namespace

PinnedMemory::PinnedMemory(std::span<std::byte> host, uint32_t gpu) {
  if (host.empty()) return;
  use_gpu(gpu);
  if (pin_host(open_cuda_library(), host, fmt::format("GPU {}", gpu))) memory_ = host.data();
}

PinnedMemory::~PinnedMemory() {
  if (memory_ == nullptr) return;
  const CudaLibrary cuda = open_cuda_library();
  if (cuda.cudaHostUnregister(memory_) != cudaSuccess) cuda.cudaGetLastError();
}

GpuScope::GpuScope(bool uses_gpus) {
  if (!uses_gpus) return;
  static const CudaLibrary cuda = open_cuda_library();
  if (cuda.cudaGetDevice(&before_) != cudaSuccess) before_ = -1;
}

GpuScope::~GpuScope() {
  if (before_ < 0) return;
  static const CudaLibrary cuda = open_cuda_library();
  int now = before_;
  if (cuda.cudaGetDevice(&now) == cudaSuccess && now != before_) {
    cuda.cudaSetDevice(before_);
  }
}

std::unique_ptr<CudaDevice> make_cuda_device(uint64_t bytes, uint32_t gpu) {
  const CudaGpus found = cuda_devices();
  if (found.gpus.empty()) fail(ErrorCode::not_found, "no GPU {}: {}", gpu, found.absence);
  if (gpu >= found.gpus.size()) {
    fail(ErrorCode::invalid_config,
         "no GPU {}: CUDA shows {} to this process, counted from 0; see `overspill info` and "
         "CUDA_VISIBLE_DEVICES",
         gpu, found.gpus.size());
  }
  return std::make_unique<Gpu>(open_cuda_library(), found.gpus[gpu], bytes);
}

}  // namespace overspill
