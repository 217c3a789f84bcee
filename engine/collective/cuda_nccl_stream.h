// The collective stream of a GPU, as NCCL's groups use it. Without CUDA in the build it is there
// and refuses (no_cuda_nccl_stream.cpp).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "engine/collective/nccl_collective.h"
#include "offload/cuda_device.h"

namespace overspill {

/// Launchers of kernels; `stream` is a cudaStream_t. They only put work on it.
struct CudaReductionKernels {
  /// To nearest, ties to even.
  void (*float_to_bf16)(void* stream, const float* values, uint16_t* rounded, uint64_t count);
  void (*bf16_to_float)(void* stream, const uint16_t* rounded, float* values, uint64_t count);
  /// sum[i] += values[i] in float32.
  void (*add)(void* stream, const float* values, float* sum, uint64_t count);
  void (*add_bf16)(void* stream, const uint16_t* values, float* sum, uint64_t count);
};

/// Those of the GPU's model. Throws Error(not_found) without them in the build.
CudaReductionKernels cuda_reduction_kernels();

/// On the device's collective stream; destroyed before the device. Host memory that is not pinned
/// is copied through a pinned buffer of its own by host functions on the stream, so that no call
/// waits in CUDA for a rank that is lost. Throws Error(io) when CUDA fails.
std::unique_ptr<NcclStream> make_cuda_nccl_stream(CudaDevice& device,
                                                  const CudaReductionKernels& kernels);

}  // namespace overspill
