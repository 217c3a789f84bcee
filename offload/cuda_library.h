// The CUDA runtime, opened at run time, so that one binary starts on machines without it: the part
// of its C API that is used, by its own declarations. For files that are built only with CUDA.
#pragma once

#include <cuda_runtime_api.h>

namespace overspill {

// clang-format off
#define OVERSPILL_CUDA_FUNCTIONS(F)                                                    \
  F(cudaRuntimeGetVersion) F(cudaDriverGetVersion) F(cudaGetDeviceCount)               \
  F(cudaGetDeviceProperties) F(cudaDeviceGetPCIBusId) F(cudaDeviceCanAccessPeer)       \
  F(cudaGetErrorName) F(cudaGetErrorString) F(cudaGetLastError)                        \
  F(cudaSetDevice) F(cudaGetDevice) F(cudaSetDeviceFlags)                              \
  F(cudaDeviceGetStreamPriorityRange)                                                  \
  F(cudaMemGetInfo) F(cudaMalloc) F(cudaFree) F(cudaHostAlloc) F(cudaFreeHost)         \
  F(cudaHostRegister) F(cudaHostUnregister) F(cudaPointerGetAttributes)                \
  F(cudaStreamCreateWithPriority) F(cudaStreamDestroy) F(cudaStreamQuery)              \
  F(cudaStreamSynchronize) F(cudaStreamWaitEvent) F(cudaLaunchHostFunc)                \
  F(cudaEventCreateWithFlags) F(cudaEventDestroy) F(cudaEventRecord) F(cudaEventQuery) \
  F(cudaEventSynchronize) F(cudaMemcpy) F(cudaMemcpyAsync) F(cudaMemsetAsync)
// clang-format on

/// Functions by their own names: cuda.cudaMalloc(...).
struct CudaLibrary {
#define OVERSPILL_CUDA_POINTER(name) decltype(&::name) name = nullptr;
  OVERSPILL_CUDA_FUNCTIONS(OVERSPILL_CUDA_POINTER)
#undef OVERSPILL_CUDA_POINTER
};

/// The runtime that kernels are linked with, else libcudart.so of the headers' major version, or
/// the file that the environment's OVERSPILL_CUDART names. It stays loaded. Throws Error(not_found)
/// saying how to install it, or Error(invalid_config) when it is another library or version.
CudaLibrary open_cuda_library();

}  // namespace overspill
