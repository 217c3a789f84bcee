// The update rules on the GPU, operation by operation those of optim/update_kernels.cpp, and what
// they update: masters and gradients in both formats. For .cu files.
#pragma once

#include "engine/base/cuda_vector.h"
#include "optim/optimizer.h"

namespace overspill::cuda {

/// A kind, with what decides its moments.
enum class Rule : uint8_t { adamw, lion, sgd, sgd_with_momentum, adafactor };
template <Rule kRule>
inline constexpr bool kHasFirst = kRule != Rule::sgd&& kRule != Rule::adafactor;
template <Rule kRule>
inline constexpr bool kHasSecond = kRule == Rule::adamw || kRule == Rule::adafactor;

/// One run: its scalars, and its arrays from its first parameter on.
struct DeviceRun {
  uint64_t size;
  float decay, step_size, gradient_scale;
  float beta1, beta2, one_minus_beta1, one_minus_beta2;
  float inverse_sqrt_bias2, epsilon;
  std::byte *weight, *remainder, *first, *second;
  const std::byte* gradient;
  float *first_scales, *second_scales;  ///< int8 only
  uint64_t rounding_key;                ///< of the step and layer, mixed once more
  uint64_t first_block;                 ///< in the layer
};

/// With moments in bf16 or int8, which sgd without momentum and adafactor do not have.
void launch_coded_update(cudaStream_t stream, StateFormat state, MasterFormat master, Rule rule,
                         const DeviceRun& run);

__device__ inline float exact_sub(float a, float b) { return exact_add(a, -b); }

/// Adafactor's step along g / sqrt(v).
__device__ inline float normalised(const DeviceRun& a, float p, float g, float v) {
  const float change = exact_mul(a.step_size, exact_div(g, exact_sqrt(v)));
  return exact_sub(exact_mul(p, a.decay), change);
}

template <Rule kRule>
__device__ float next_master(const DeviceRun& a, float p, float g, float& m, float& v) {
  g = exact_mul(g, a.gradient_scale);
  if constexpr (kRule == Rule::adamw) {
    p = exact_mul(p, a.decay);
    m = exact_add(m, exact_mul(a.one_minus_beta1, exact_sub(g, m)));
    v = exact_add(exact_mul(a.beta2, v), exact_mul(exact_mul(a.one_minus_beta2, g), g));
    const float root = exact_mul(exact_sqrt(v), a.inverse_sqrt_bias2);
    const float ratio = exact_div(m, exact_add(root, a.epsilon));
    return exact_sub(p, exact_mul(a.step_size, ratio));
  } else if constexpr (kRule == Rule::lion) {
    p = exact_mul(p, a.decay);
    const float direction = exact_add(exact_mul(a.beta1, m), exact_mul(a.one_minus_beta1, g));
    m = exact_add(exact_mul(a.beta2, m), exact_mul(a.one_minus_beta2, g));
    const float change = direction != 0 ? copysignf(a.step_size, direction) : 0.0f;
    return exact_sub(p, change);
  } else if constexpr (kRule == Rule::adafactor) {
    const float square = exact_add(exact_mul(g, g), a.epsilon);
    v = exact_add(exact_mul(a.beta2, v), exact_mul(a.one_minus_beta2, square));
    return normalised(a, p, g, v);
  } else {
    g = exact_add(g, exact_mul(a.decay, p));
    if constexpr (kRule == Rule::sgd_with_momentum) {
      m = exact_add(exact_mul(a.beta1, m), g);
      g = m;
    }
    return exact_sub(p, exact_mul(a.step_size, g));
  }
}

/// optim/split_master.h: the weight's bits above the remainder's, which may carry.
template <int kWidth>
__device__ void load_split(const DeviceRun& a, uint64_t i, float (&master)[kWidth]) {
  const auto* remainder = reinterpret_cast<const int16_t*>(a.remainder) + i;
  load<kWidth>(reinterpret_cast<const bf16*>(a.weight) + i, master);
  alignas(16) int16_t low[kWidth];
  if constexpr (kWidth == 1) {
    low[0] = *remainder;
  } else {
    *reinterpret_cast<uint4*>(low) = *reinterpret_cast<const uint4*>(remainder);
  }
  for (int j = 0; j < kWidth; ++j) {
    const auto carry = static_cast<uint32_t>(static_cast<int32_t>(low[j]));
    master[j] = float_of_bits(bits_of_float(master[j]) + carry);
  }
}

template <int kWidth>
__device__ void store_halves(const uint16_t (&from)[kWidth], std::byte* array, uint64_t i) {
  auto* const to = reinterpret_cast<uint16_t*>(array) + i;
  if constexpr (kWidth == 1) {
    *to = from[0];
  } else {
    *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
  }
}

template <MasterFormat kMaster, int kWidth>
__device__ void load_parameters(const DeviceRun& a, uint64_t i, float (&master)[kWidth],
                                float (&gradient)[kWidth]) {
  if constexpr (kMaster == MasterFormat::split) {
    load_split<kWidth>(a, i, master);
    load<kWidth>(reinterpret_cast<const bf16*>(a.gradient) + i, gradient);
  } else {
    load<kWidth>(reinterpret_cast<const float*>(a.weight) + i, master);
    load<kWidth>(reinterpret_cast<const float*>(a.gradient) + i, gradient);
  }
}

template <MasterFormat kMaster, int kWidth>
__device__ void store_master(const float (&master)[kWidth], const DeviceRun& a, uint64_t i) {
  if constexpr (kMaster == MasterFormat::split) {
    alignas(16) uint16_t high[kWidth], low[kWidth];
    for (int j = 0; j < kWidth; ++j) {
      const uint32_t bits = bits_of_float(master[j]);
      high[j] = static_cast<uint16_t>((bits + 0x8000u) >> 16);
      low[j] = static_cast<uint16_t>(bits);
    }
    store_halves<kWidth>(high, a.weight, i);
    store_halves<kWidth>(low, a.remainder, i);
  } else {
    store<kWidth>(master, reinterpret_cast<float*>(a.weight) + i);
  }
}

}  // namespace overspill::cuda
