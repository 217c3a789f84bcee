// What kernels may use besides arithmetic, so that one source serves two compilers: under nvcc thin
// names for CUDA, under g++ the emulation of the tests (tests/emulation/kernel_emulation.h, which
// must be included before). Warps are always whole: blocks are multiples of 32 threads and all
// lanes take part in every exchange. A bare __shared__ does not compile in the emulation.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>
#include <vector_types.h>

#include <cstdint>

#include "engine/base/cuda_launch.h"

#if defined(__CUDACC__)

/// Starts a kernel. Template arguments with commas need parentheses around the kernel.
#define OVERSPILL_LAUNCH(kernel, grid, threads, shared_bytes, stream, ...)          \
  do {                                                                              \
    kernel<<<(grid), (threads), (shared_bytes), (stream)>>>(__VA_ARGS__);           \
    const cudaError_t launch_status = cudaGetLastError();                           \
    if (launch_status != cudaSuccess) {                                             \
      ::overspill::cuda::launch_failed(#kernel, cudaGetErrorString(launch_status)); \
    }                                                                               \
  } while (false)
/// An array in shared memory: OVERSPILL_SHARED(float, tile, [32][33]).
#define OVERSPILL_SHARED(type, name, extents) __shared__ alignas(16) type name extents
/// The launch's shared_bytes.
#define OVERSPILL_DYNAMIC_SHARED(type, name)                       \
  extern __shared__ __align__(16) unsigned char dynamic_shared_[]; \
  type* const name = reinterpret_cast<type*>(dynamic_shared_)

namespace overspill::cuda {

__device__ __forceinline__ void block_barrier() { __syncthreads(); }
__device__ __forceinline__ void warp_barrier() { __syncwarp(); }
template <class T>
__device__ __forceinline__ T shuffle_xor(T value, int mask) {
  return __shfl_xor_sync(0xffffffffu, value, mask);
}
/// Bit i: lane i's condition.
__device__ __forceinline__ uint32_t ballot(bool condition) {
  return __ballot_sync(0xffffffffu, condition);
}
/// Correctly rounded and never fused, as the host's under -ffp-contract=off.
__device__ __forceinline__ float exact_add(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ float exact_mul(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ float exact_div(float a, float b) { return __fdiv_rn(a, b); }
__device__ __forceinline__ float exact_sqrt(float a) { return __fsqrt_rn(a); }
__device__ __forceinline__ float float_of_bits(uint32_t bits) { return __uint_as_float(bits); }
__device__ __forceinline__ uint32_t bits_of_float(float value) { return __float_as_uint(value); }
/// Position of the lowest bit; bits != 0.
__device__ __forceinline__ int lowest_bit(uint32_t bits) {
  return __ffs(static_cast<int>(bits)) - 1;
}

}  // namespace overspill::cuda

#elif !defined(OVERSPILL_KERNEL_EMULATION)
#error "outside nvcc, include tests/emulation/kernel_emulation.h before a .cu file"
#endif
