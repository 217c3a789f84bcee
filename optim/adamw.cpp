// The AdamW loop, once per state format, vectorised by the compiler and cut into fixed blocks.
#include "optim/adamw.h"

#include <algorithm>
#include <cmath>

#include "engine/base/dtype.h"
#include "engine/base/parallel.h"
#include "engine/base/simd.h"
#include "optim/split_master.h"

namespace overspill {
namespace {

constexpr uint64_t kBlock = 1 << 15;

/// One parameter; updates the moments in place and returns the new master.
[[gnu::always_inline]] inline float update_one(const AdamWStep& s, float decay, float p, float g,
                                               float& m, float& v) {
  g *= s.gradient_scale;
  p *= decay;
  m += s.one_minus_beta1 * (g - m);
  v = s.beta2 * v + s.one_minus_beta2 * g * g;
  return p - s.step_size * (m / (std::sqrt(v) * s.inverse_sqrt_bias2 + s.epsilon));
}

OVERSPILL_SIMD void update_split(const AdamWStep& s, float decay, const SplitChunk& c,
                                 uint64_t begin, uint64_t end, bool zero) {
  uint16_t* __restrict weight = c.weight;
  int16_t* __restrict remainder = c.remainder;
  float* __restrict exp_avg = c.exp_avg;
  float* __restrict exp_avg_sq = c.exp_avg_sq;
  const uint16_t* __restrict gradient = c.gradient;
  if (zero) {
    std::fill(exp_avg + begin, exp_avg + end, 0.0f);
    std::fill(exp_avg_sq + begin, exp_avg_sq + end, 0.0f);
  }
  for (uint64_t i = begin; i < end; ++i) {
    const float p = update_one(s, decay, join_master(weight[i], remainder[i]),
                               bf16_to_float(gradient[i]), exp_avg[i], exp_avg_sq[i]);
    const SplitMaster split = split_master(p);
    weight[i] = split.weight;
    remainder[i] = split.remainder;
  }
}

OVERSPILL_SIMD void update_float32(const AdamWStep& s, float decay, const Float32Chunk& c,
                                   uint64_t begin, uint64_t end, bool zero) {
  float* __restrict weight = c.weight;
  float* __restrict exp_avg = c.exp_avg;
  float* __restrict exp_avg_sq = c.exp_avg_sq;
  const float* __restrict gradient = c.gradient;
  if (zero) {
    std::fill(exp_avg + begin, exp_avg + end, 0.0f);
    std::fill(exp_avg_sq + begin, exp_avg_sq + end, 0.0f);
  }
  for (uint64_t i = begin; i < end; ++i) {
    weight[i] = update_one(s, decay, weight[i], gradient[i], exp_avg[i], exp_avg_sq[i]);
  }
}

/// Calls update(decay factor, begin, end) over [0, size), split where decay starts and stops.
template <class Update>
void for_ranges(uint64_t size, float decay, std::span<const DecayRange> ranges,
                const Update& update) {
  const auto blocks = [&](float factor, uint64_t first, uint64_t last) {
    parallel_blocks(last - first, kBlock, [&](uint64_t begin, uint64_t end) {
      update(factor, first + begin, first + end);
    });
  };
  uint64_t at = 0;
  for (const DecayRange& range : ranges) {
    if (at < range.begin) blocks(1.0f, at, range.begin);
    blocks(decay, range.begin, range.end);
    at = range.end;
  }
  if (at < size) blocks(1.0f, at, size);
}

}  // namespace

AdamWStep adamw_step(const AdamWSettings& settings, double learning_rate, uint64_t step,
                     double gradient_scale) {
  const double t = static_cast<double>(step);
  const double bias1 = 1.0 - std::pow(settings.beta1, t);
  const double bias2 = 1.0 - std::pow(settings.beta2, t);
  return {.gradient_scale = static_cast<float>(gradient_scale),
          .decay = static_cast<float>(1.0 - learning_rate * settings.weight_decay),
          .beta2 = static_cast<float>(settings.beta2),
          .one_minus_beta1 = static_cast<float>(1.0 - settings.beta1),
          .one_minus_beta2 = static_cast<float>(1.0 - settings.beta2),
          .step_size = static_cast<float>(learning_rate / bias1),
          .inverse_sqrt_bias2 = static_cast<float>(1.0 / std::sqrt(bias2)),
          .epsilon = static_cast<float>(settings.epsilon)};
}

void adamw_update(const AdamWStep& step, const SplitChunk& chunk, uint64_t size,
                  std::span<const DecayRange> decay, bool moments_zero) {
  for_ranges(size, step.decay, decay, [&](float factor, uint64_t begin, uint64_t end) {
    update_split(step, factor, chunk, begin, end, moments_zero);
  });
}

void adamw_update(const AdamWStep& step, const Float32Chunk& chunk, uint64_t size,
                  std::span<const DecayRange> decay, bool moments_zero) {
  for_ranges(size, step.decay, decay, [&](float factor, uint64_t begin, uint64_t end) {
    update_float32(step, factor, chunk, begin, end, moments_zero);
  });
}

}  // namespace overspill
