// AdamW (Loshchilov and Hutter 2019) with PyTorch's formula, over one chunk:
//   p *= 1 - lr*wd;  m += (1-b1)(g - m);  v = b2 v + (1-b2) g^2;
//   p -= lr/(1-b1^t) * m / (sqrt(v)/sqrt(1-b2^t) + eps)
// Element-wise, so that no bit depends on threads, chunks or placement. Thread-safe.
#pragma once

#include <cstdint>
#include <span>

namespace overspill {

struct AdamWSettings {
  double beta1 = 0.9;
  double beta2 = 0.999;
  double epsilon = 1e-8;
  double weight_decay = 0.0;
};

/// The scalars of one step, computed in float64 and rounded once.
struct AdamWStep {
  float gradient_scale;  ///< clip factor
  float decay;           ///< 1 - lr * weight_decay
  float beta2, one_minus_beta1, one_minus_beta2;
  float step_size;  ///< lr / (1 - beta1^t)
  float inverse_sqrt_bias2;
  float epsilon;
};
AdamWStep adamw_step(const AdamWSettings& settings, double learning_rate, uint64_t step,
                     double gradient_scale);

/// Where weight decay applies: [begin, end) of the chunk's parameters.
struct DecayRange {
  uint64_t begin, end;
};

/// Split master: weight (bf16) and remainder hold the float32 master exactly (split_master.h).
struct SplitChunk {
  uint16_t* weight;
  int16_t* remainder;
  float* exp_avg;
  float* exp_avg_sq;
  const uint16_t* gradient;  ///< bf16
};
struct Float32Chunk {
  float* weight;
  float* exp_avg;
  float* exp_avg_sq;
  const float* gradient;
};

/// Updates `size` parameters. With moments_zero the moments are taken as zero and not read.
void adamw_update(const AdamWStep& step, const SplitChunk& chunk, uint64_t size,
                  std::span<const DecayRange> decay, bool moments_zero);
void adamw_update(const AdamWStep& step, const Float32Chunk& chunk, uint64_t size,
                  std::span<const DecayRange> decay, bool moments_zero);

}  // namespace overspill
