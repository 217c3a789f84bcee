// The update rules on the GPU. Operation by operation those of optim/update_kernels.cpp, in terms
// of exact_add, exact_mul, exact_div and exact_sqrt.
#include "optim/cuda_update.h"

#include "engine/base/cuda_vector.h"

namespace overspill::cuda {
namespace {

/// The scalars of one run, and its arrays from its first parameter on.
struct Run {
  float decay, step_size, gradient_scale;
  float beta1, beta2, one_minus_beta1, one_minus_beta2;
  float inverse_sqrt_bias2, epsilon;
  std::byte *weight, *remainder;
  float *first, *second;
  const std::byte* gradient;
};

__device__ inline float exact_sub(float a, float b) { return exact_add(a, -b); }

/// kMomentum: sgd has a first moment.
template <OptimizerKind kKind, bool kMomentum>
__device__ float next_master(const Run& a, float p, float g, float& m, float& v) {
  g = exact_mul(g, a.gradient_scale);
  if constexpr (kKind == OptimizerKind::adamw) {
    p = exact_mul(p, a.decay);
    m = exact_add(m, exact_mul(a.one_minus_beta1, exact_sub(g, m)));
    v = exact_add(exact_mul(a.beta2, v), exact_mul(exact_mul(a.one_minus_beta2, g), g));
    const float root = exact_mul(exact_sqrt(v), a.inverse_sqrt_bias2);
    const float ratio = exact_div(m, exact_add(root, a.epsilon));
    return exact_sub(p, exact_mul(a.step_size, ratio));
  } else if constexpr (kKind == OptimizerKind::lion) {
    p = exact_mul(p, a.decay);
    const float direction = exact_add(exact_mul(a.beta1, m), exact_mul(a.one_minus_beta1, g));
    m = exact_add(exact_mul(a.beta2, m), exact_mul(a.one_minus_beta2, g));
    const float change = direction != 0 ? copysignf(a.step_size, direction) : 0.0f;
    return exact_sub(p, change);
  } else {
    g = exact_add(g, exact_mul(a.decay, p));
    if constexpr (kMomentum) {
      m = exact_add(exact_mul(a.beta1, m), g);
      g = m;
    }
    return exact_sub(p, exact_mul(a.step_size, g));
  }
}

/// optim/split_master.h: the weight's bits above the remainder's, which may carry.
template <int kWidth>
__device__ void load_split(const Run& a, uint64_t i, float (&master)[kWidth]) {
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
__device__ void store_split(const float (&master)[kWidth], const Run& a, uint64_t i) {
  alignas(16) uint16_t high[kWidth], low[kWidth];
  for (int j = 0; j < kWidth; ++j) {
    const uint32_t bits = bits_of_float(master[j]);
    high[j] = static_cast<uint16_t>((bits + 0x8000u) >> 16);
    low[j] = static_cast<uint16_t>(bits);
  }
  auto* weight = reinterpret_cast<uint16_t*>(a.weight) + i;
  auto* remainder = reinterpret_cast<uint16_t*>(a.remainder) + i;
  if constexpr (kWidth == 1) {
    *weight = high[0];
    *remainder = low[0];
  } else {
    *reinterpret_cast<uint4*>(weight) = *reinterpret_cast<const uint4*>(high);
    *reinterpret_cast<uint4*>(remainder) = *reinterpret_cast<const uint4*>(low);
  }
}

template <OptimizerKind kKind, MasterFormat kMaster, bool kMomentum>
struct Update {
  static constexpr bool kFirst = kKind != OptimizerKind::sgd || kMomentum;
  static constexpr bool kSecond = kKind == OptimizerKind::adamw;
  Run run;

  template <int kWidth>
  __device__ void at(uint64_t i) const {
    float p[kWidth], g[kWidth], m[kWidth] = {}, v[kWidth] = {};
    if constexpr (kMaster == MasterFormat::split) {
      load_split<kWidth>(run, i, p);
      load<kWidth>(reinterpret_cast<const bf16*>(run.gradient) + i, g);
    } else {
      load<kWidth>(reinterpret_cast<const float*>(run.weight) + i, p);
      load<kWidth>(reinterpret_cast<const float*>(run.gradient) + i, g);
    }
    if constexpr (kFirst) load<kWidth>(run.first + i, m);
    if constexpr (kSecond) load<kWidth>(run.second + i, v);
    for (int j = 0; j < kWidth; ++j)
      p[j] = next_master<kKind, kMomentum>(run, p[j], g[j], m[j], v[j]);
    if constexpr (kMaster == MasterFormat::split) {
      store_split<kWidth>(p, run, i);
    } else {
      store<kWidth>(p, reinterpret_cast<float*>(run.weight) + i);
    }
    if constexpr (kFirst) store<kWidth>(m, run.first + i);
    if constexpr (kSecond) store<kWidth>(v, run.second + i);
  }
};

struct ZeroMoments {
  float* moments;
  template <int kWidth>
  __device__ void at(uint64_t i) const {
    const float zero[kWidth] = {};
    store<kWidth>(zero, moments + i);
  }
};

template <MasterFormat kMaster>
void launch_update(cudaStream_t stream, const OptimizerSettings& settings, const Run& run,
                   uint64_t size) {
  switch (settings.kind) {
    case OptimizerKind::adamw:
      return launch_elementwise(stream, Update<OptimizerKind::adamw, kMaster, true>{run}, 0, size,
                                true);
    case OptimizerKind::lion:
      return launch_elementwise(stream, Update<OptimizerKind::lion, kMaster, true>{run}, 0, size,
                                true);
    case OptimizerKind::sgd:
      if (settings.momentum != 0) {
        return launch_elementwise(stream, Update<OptimizerKind::sgd, kMaster, true>{run}, 0, size,
                                  true);
      }
      return launch_elementwise(stream, Update<OptimizerKind::sgd, kMaster, false>{run}, 0, size,
                                true);
    case OptimizerKind::adafactor: break;
  }
  launch_failed("update", "the optimizer has no update on the GPU");
}

}  // namespace

bool updates_on_device(const OptimizerSettings& settings) {
  return settings.state == StateFormat::float32 && settings.kind != OptimizerKind::adafactor;
}

void update_chunk(cudaStream_t stream, const OptimizerSettings& settings, const UpdateStep& step,
                  const UpdateChunk& chunk, std::span<const UpdateRun> runs, bool moments_zero) {
  if (!updates_on_device(settings)) {
    launch_failed("update", "the optimizer's state has no update on the GPU");
  }
  const StateLayout layout = state_layout(settings, chunk.parameters, 0);
  const bool split = settings.master == MasterFormat::split;
  const uint64_t width = split ? 2 : 4;
  auto* const moments = reinterpret_cast<float*>(chunk.state + layout.first);
  if (moments_zero) {
    const uint64_t size = (layout.bytes - layout.first) / sizeof(float);
    launch_elementwise(stream, ZeroMoments{moments}, 0, size, true);
  }
  for (const UpdateRun& run : runs) {
    const UpdateStep::Group& group = step.groups[run.group];
    const float no_decay = settings.kind == OptimizerKind::sgd ? 0.0f : 1.0f;
    const Run arrays{run.decay ? group.decay : no_decay,
                     group.step_size,
                     step.gradient_scale,
                     step.beta1,
                     step.beta2,
                     step.one_minus_beta1,
                     step.one_minus_beta2,
                     step.inverse_sqrt_bias2,
                     step.epsilon,
                     chunk.weight + run.begin * width,
                     chunk.state + layout.remainder + run.begin * 2,
                     moments + run.begin,
                     reinterpret_cast<float*>(chunk.state + layout.second) + run.begin,
                     chunk.gradient + run.begin * width};
    if (split) {
      launch_update<MasterFormat::split>(stream, settings, arrays, run.end - run.begin);
    } else {
      launch_update<MasterFormat::float32>(stream, settings, arrays, run.end - run.begin);
    }
  }
}

}  // namespace overspill::cuda
