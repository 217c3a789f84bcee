// Copies, casts and sums between NCCL's parts, put on the device's collective stream.
#include "engine/collective/cuda_nccl_stream.h"

#include <algorithm>
#include <cstring>
#include <deque>

#include "engine/base/error.h"
#include "engine/base/units.h"
#include "offload/cuda_error.h"
#include "offload/cuda_library.h"

namespace overspill {
namespace {

constexpr uint64_t kBounceBytes = 64 * kKiB;

/// One memcpy that the stream does on the host.
struct HostCopy {
  void* to;
  const void* from;
  size_t bytes;
  static void run(void* argument) {
    const auto& copy = *static_cast<const HostCopy*>(argument);
    std::memcpy(copy.to, copy.from, copy.bytes);
  }
};

class CudaNcclStream final : public NcclStream {
 public:
  CudaNcclStream(CudaDevice& device, const CudaReductionKernels& kernels)
      : cuda_(open_cuda_library()), device_(device), kernels_(kernels), stream_(use()) {
    void* memory = nullptr;
    cuda_check(cuda_, cuda_.cudaHostAlloc(&memory, kBounceBytes, cudaHostAllocPortable),
               "allocate {} bytes of pinned memory for collectives", kBounceBytes);
    bounce_ = static_cast<std::byte*>(memory);
  }
  ~CudaNcclStream() override {
    cuda_.cudaSetDevice(static_cast<int>(device_.gpu()));
    cuda_.cudaStreamSynchronize(stream_);
    cuda_.cudaFreeHost(bounce_);
  }
  CudaNcclStream(const CudaNcclStream&) = delete;
  CudaNcclStream& operator=(const CudaNcclStream&) = delete;

  void* handle() const override { return use(); }
  bool idle() override {
    use();
    const cudaError_t status = cuda_.cudaStreamQuery(stream_);
    if (status == cudaErrorNotReady) return false;
    cuda_check(cuda_, status, "finish the work on the collective stream of {}", device_.name());
    host_copies_.clear();
    return true;
  }
  void copy(void* to, const void* from, size_t bytes) override;
  void round_to_bf16(const float* values, uint16_t* rounded, size_t count) override {
    kernels_.float_to_bf16(use(), values, rounded, count);
    check_launch("round to bf16");
  }
  void widen_bf16(const uint16_t* rounded, float* values, size_t count) override {
    kernels_.bf16_to_float(use(), rounded, values, count);
    check_launch("widen bf16");
  }
  void sum_in_rank_order(ReduceType type, const void* contributions, size_t stride, uint32_t ranks,
                         float* sum, size_t count) override;

 private:
  cudaStream_t use() const {
    return static_cast<cudaStream_t>(device_.native_stream(DeviceStream::collective));
  }
  void check_launch(const char* what) {
    cuda_check(cuda_, cuda_.cudaGetLastError(), "{} on the collective stream of {}", what,
               device_.name());
  }
  bool pageable(const void* memory) const;
  void put_copy(void* to, const void* from, size_t bytes);
  void put_host_copy(void* to, const void* from, size_t bytes);

  const CudaLibrary cuda_;
  CudaDevice& device_;
  const CudaReductionKernels kernels_;
  const cudaStream_t stream_;
  std::byte* bounce_ = nullptr;
  std::deque<HostCopy> host_copies_;  ///< kept in place until the stream is idle
};

bool CudaNcclStream::pageable(const void* memory) const {
  cudaPointerAttributes attributes{};
  cuda_check(cuda_, cuda_.cudaPointerGetAttributes(&attributes, memory),
             "ask where memory of a collective lies");
  return attributes.type == cudaMemoryTypeUnregistered;
}

void CudaNcclStream::put_copy(void* to, const void* from, size_t bytes) {
  cuda_check(cuda_, cuda_.cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_),
             "copy {} bytes on the collective stream of {}", bytes, device_.name());
}

void CudaNcclStream::put_host_copy(void* to, const void* from, size_t bytes) {
  device_.launch_host_function(DeviceStream::collective, HostCopy::run,
                               &host_copies_.emplace_back(HostCopy{to, from, bytes}));
}

void CudaNcclStream::copy(void* to, const void* from, size_t bytes) {
  use();
  const bool into_pageable = pageable(to), out_of_pageable = pageable(from);
  CHECK(!into_pageable || !out_of_pageable);
  if (!into_pageable && !out_of_pageable) return put_copy(to, from, bytes);
  // The stream's order lets one buffer serve all pieces.
  for (size_t at = 0; at < bytes; at += kBounceBytes) {
    const size_t piece = std::min<size_t>(kBounceBytes, bytes - at);
    auto* const target = static_cast<std::byte*>(to) + at;
    const auto* const source = static_cast<const std::byte*>(from) + at;
    if (out_of_pageable) {
      put_host_copy(bounce_, source, piece);
      put_copy(target, bounce_, piece);
    } else {
      put_copy(bounce_, source, piece);
      put_host_copy(target, bounce_, piece);
    }
  }
}

void CudaNcclStream::sum_in_rank_order(ReduceType type, const void* contributions, size_t stride,
                                       uint32_t ranks, float* sum, size_t count) {
  if (type == ReduceType::bf16) {
    const auto* const values = static_cast<const uint16_t*>(contributions);
    kernels_.bf16_to_float(use(), values, sum, count);
    for (uint32_t r = 1; r < ranks; ++r) {
      kernels_.add_bf16(stream_, values + r * stride, sum, count);
    }
  } else {
    const auto* const values = static_cast<const float*>(contributions);
    use();
    put_copy(sum, values, count * sizeof(float));
    for (uint32_t r = 1; r < ranks; ++r) kernels_.add(stream_, values + r * stride, sum, count);
  }
  check_launch("sum contributions");
}

}  // namespace

std::unique_ptr<NcclStream> make_cuda_nccl_stream(CudaDevice& device,
                                                  const CudaReductionKernels& kernels) {
  return std::make_unique<CudaNcclStream>(device, kernels);
}

}  // namespace overspill
