// The other side of engine/base/cuda_portability.h: kernels compiled by g++ and run by block.h. To
// be included before a .cu file, and by nothing else.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>
#include <vector_types.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>

#include "tests/emulation/block.h"

#define OVERSPILL_KERNEL_EMULATION

#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __forceinline__
#undef __launch_bounds__
#define __global__
#define __device__
#define __host__
#define __shared__ static_assert(false, "use OVERSPILL_SHARED");
#define __forceinline__ inline
#define __launch_bounds__(...)

#define threadIdx (::overspill::emulation::current_block().thread_index)
#define blockIdx (::overspill::emulation::current_block().block_index)
#define blockDim (::overspill::emulation::current_block().block_extents)
#define gridDim (::overspill::emulation::current_block().grid_extents)

#define OVERSPILL_LAUNCH(kernel, grid, threads, shared_bytes, stream, ...)            \
  ::overspill::emulation::launch_kernel(#kernel, kernel, grid, threads, shared_bytes, \
                                        stream __VA_OPT__(, ) __VA_ARGS__)
#define OVERSPILL_SHARED(type, name, extents)            \
  static const char name##_key = 0;                      \
  using name##_array = type extents;                     \
  name##_array& name = *reinterpret_cast<name##_array*>( \
      ::overspill::emulation::current_block().shared(&name##_key, sizeof(name##_array)))
#define OVERSPILL_DYNAMIC_SHARED(type, name) \
  type* const name =                         \
      reinterpret_cast<type*>(::overspill::emulation::current_block().dynamic_shared())

namespace overspill::emulation {

/// Arguments are copied at the launch, as CUDA does.
template <class... Parameters, class... Arguments>
void launch_kernel(const char* name, void (*kernel)(Parameters...), dim3 grid, dim3 block,
                   size_t shared_bytes, cudaStream_t stream, Arguments... arguments) {
  launch(name, stream,
         {grid, block, shared_bytes,
          std::bind(kernel, static_cast<std::decay_t<Parameters>>(arguments)...)});
}

}  // namespace overspill::emulation

namespace overspill::cuda {

inline void block_barrier(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  emulation::current_block().barrier({file, line});
}
inline void warp_barrier(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  emulation::current_block().warp_barrier({file, line});
}
template <class T>
T shuffle_xor(T value, int mask, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = emulation::current_block().exchange(bits, static_cast<unsigned>(mask), {file, line});
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}
inline uint32_t ballot(bool condition, const char* file = __builtin_FILE(),
                       int line = __builtin_LINE()) {
  return emulation::current_block().ballot(condition, {file, line});
}
inline float exact_add(float a, float b) { return a + b; }
inline float exact_mul(float a, float b) { return a * b; }
inline float exact_div(float a, float b) { return a / b; }
inline float exact_sqrt(float a) { return std::sqrt(a); }
inline float float_of_bits(uint32_t bits) { return std::bit_cast<float>(bits); }
inline uint32_t bits_of_float(float value) { return std::bit_cast<uint32_t>(value); }
inline int lowest_bit(uint32_t bits) { return std::countr_zero(bits); }

}  // namespace overspill::cuda
