// Sixteen bytes at a time between memory and float registers, sums over warps and blocks in a fixed
// order, and the grid of a launch. For .cu files.
#pragma once

#include "engine/base/cuda_portability.h"

namespace overspill::cuda {

using bf16 = __nv_bfloat16;

/// Elements per vector access, of every type: float32 takes two loads of 16 bytes, bf16 one.
inline constexpr int kPack = 8;
inline constexpr int kWarp = 32;

template <class T>
__device__ __forceinline__ float to_float(T value) {
  if constexpr (sizeof(T) == 2) {
    return __bfloat162float(value);
  } else {
    return value;
  }
}
template <class T>
__device__ __forceinline__ T from_float(float value) {
  if constexpr (sizeof(T) == 2) {
    return __float2bfloat16_rn(value);
  } else {
    return value;
  }
}

/// kWidth is kPack (and `from` aligned to 16 bytes) or 1.
template <int kWidth>
__device__ __forceinline__ void load(const float* from, float (&to)[kWidth]) {
  if constexpr (kWidth == 1) {
    to[0] = *from;
  } else {
    const float4 low = *reinterpret_cast<const float4*>(from);
    const float4 high = *reinterpret_cast<const float4*>(from + 4);
    to[0] = low.x, to[1] = low.y, to[2] = low.z, to[3] = low.w;
    to[4] = high.x, to[5] = high.y, to[6] = high.z, to[7] = high.w;
  }
}
template <int kWidth>
__device__ __forceinline__ void load(const bf16* from, float (&to)[kWidth]) {
  if constexpr (kWidth == 1) {
    to[0] = __bfloat162float(*from);
  } else {
    const uint4 pairs = *reinterpret_cast<const uint4*>(from);
    const uint32_t words[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
    for (int i = 0; i < 4; ++i) {
      to[2 * i] = float_of_bits(words[i] << 16);
      to[2 * i + 1] = float_of_bits(words[i] & 0xffff0000u);
    }
  }
}

template <int kWidth>
__device__ __forceinline__ void load(const __half* from, float (&to)[kWidth]) {
  for (int i = 0; i < kWidth; ++i) to[i] = __half2float(from[i]);
}

template <int kWidth>
__device__ __forceinline__ void store(const float (&from)[kWidth], float* to) {
  if constexpr (kWidth == 1) {
    *to = from[0];
  } else {
    *reinterpret_cast<float4*>(to) = {from[0], from[1], from[2], from[3]};
    *reinterpret_cast<float4*>(to + 4) = {from[4], from[5], from[6], from[7]};
  }
}
template <int kWidth>
__device__ __forceinline__ void store(const float (&from)[kWidth], bf16* to) {
  if constexpr (kWidth == 1) {
    *to = __float2bfloat16_rn(from[0]);
  } else {
    uint32_t words[4];
    for (int i = 0; i < 4; ++i) {
      const uint32_t low = __bfloat16_as_ushort(__float2bfloat16_rn(from[2 * i]));
      const uint32_t high = __bfloat16_as_ushort(__float2bfloat16_rn(from[2 * i + 1]));
      words[i] = low | high << 16;
    }
    *reinterpret_cast<uint4*>(to) = {words[0], words[1], words[2], words[3]};
  }
}

template <class T>
__device__ __forceinline__ T warp_sum(T value) {
  for (int mask = kWarp / 2; mask > 0; mask /= 2) value += shuffle_xor(value, mask);
  return value;
}
__device__ __forceinline__ float warp_max(float value) {
  for (int mask = kWarp / 2; mask > 0; mask /= 2) value = fmaxf(value, shuffle_xor(value, mask));
  return value;
}

/// The sum over a block of kThreads, in every thread. All threads call it.
template <int kThreads, class T>
__device__ T block_sum(T value) {
  OVERSPILL_SHARED(T, partial, [kThreads / kWarp]);
  value = warp_sum(value);
  if (threadIdx.x % kWarp == 0) partial[threadIdx.x / kWarp] = value;
  block_barrier();
  T sum = partial[0];
  for (int i = 1; i < kThreads / kWarp; ++i) sum += partial[i];
  block_barrier();  // the next call must not overwrite what is still read
  return sum;
}
template <int kThreads>
__device__ float block_max(float value) {
  OVERSPILL_SHARED(float, partial, [kThreads / kWarp]);
  value = warp_max(value);
  if (threadIdx.x % kWarp == 0) partial[threadIdx.x / kWarp] = value;
  block_barrier();
  float best = partial[0];
  for (int i = 1; i < kThreads / kWarp; ++i) best = fmaxf(best, partial[i]);
  block_barrier();
  return best;
}

/// Whether all pointers allow vector access.
template <class... Pointers>
bool aligned(const Pointers*... pointers) {
  return ((reinterpret_cast<uintptr_t>(pointers) % 16 == 0) && ...);
}

constexpr uint64_t ceil_div(uint64_t a, uint64_t b) { return (a + b - 1) / b; }

/// Grids have at most 2^31 - 1 blocks in x.
inline dim3 blocks_x(uint64_t blocks, unsigned y = 1, unsigned z = 1) {
  if (blocks == 0 || blocks > 0x7fffffffu) launch_failed("grid", "0 or more than 2^31-1 blocks");
  return dim3(static_cast<unsigned>(blocks), y, z);
}

/// Calls op.at<kWidth>(i) for i = 0, kWidth, ...: whole packs, then single elements at the end.
template <int kWidth, int kThreads, class Op>
__global__ void __launch_bounds__(kThreads) elementwise(Op op, uint64_t begin, uint64_t end) {
  const uint64_t i = begin + (uint64_t{blockIdx.x} * kThreads + threadIdx.x) * kWidth;
  if (i + kWidth <= end) {
    op.template at<kWidth>(i);
  } else {
    for (uint64_t j = i; j < end; ++j) op.template at<1>(j);
  }
}

/// Elements [begin, end), begin a multiple of kPack; `vector` where all arrays are aligned.
template <class Op>
void launch_elementwise(cudaStream_t stream, const Op& op, uint64_t begin, uint64_t end,
                        bool vector) {
  constexpr int kThreads = 256;
  if (begin == end) return;
  const uint64_t per_block = uint64_t{kThreads} * (vector ? kPack : 1);
  const dim3 grid = blocks_x(ceil_div(end - begin, per_block));
  if (vector) {
    OVERSPILL_LAUNCH((elementwise<kPack, kThreads, Op>), grid, kThreads, 0, stream, op, begin, end);
  } else {
    OVERSPILL_LAUNCH((elementwise<1, kThreads, Op>), grid, kThreads, 0, stream, op, begin, end);
  }
}

}  // namespace overspill::cuda
