// Optimizer updates over one chunk, for every algorithm and state format. A chunk's parameters are
// updated element by element and moments are coded in fixed blocks of 256, so that no bit depends
// on threads, chunk sizes, shards or placement. Thread-safe.
//
// AdamW (Loshchilov and Hutter 2019) with PyTorch's formula:
//   p *= 1 - lr*wd;  m += (1-b1)(g - m);  v = b2 v + (1-b2) g^2;
//   p -= lr/(1-b1^t) * m / (sqrt(v)/sqrt(1-b2^t) + eps)
// Lion (Chen et al. 2023):
//   p *= 1 - lr*wd;  p -= lr * sign(b1 m + (1-b1) g);  m = b2 m + (1-b2) g
// SGD with momentum, PyTorch's formula (its weight decay is part of the gradient):
//   g += wd*p;  m = momentum*m + g;  p -= lr*m
// Adafactor's factored second moment (Shazeer and Stern 2018), with a learning rate of one's own
// and without the parameter scale, update clipping and the first moment (transformers' Adafactor
// with scale_parameter=False, relative_step=False, beta1=None); b = 1 - t^-decay, eps = 1e-30:
//   row = b row + (1-b) mean over the row of (g^2 + eps), col likewise;
//   p *= 1 - lr*wd;  p -= lr * g * sqrt(mean(row) / row) / sqrt(col)
// A tensor of rank 1 has v = b v + (1-b)(g^2 + eps) and p -= lr * g / sqrt(v).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "optim/factored_moment.h"

namespace overspill {

enum class OptimizerKind : uint8_t { adamw, lion, sgd, adafactor };
enum class StateFormat : uint8_t {
  float32,
  bfloat16,  ///< stochastically rounded (moment_formats.h)
  int8,      ///< 256 codes and a scale per block of 256, stochastically rounded
};
/// How weights are held.
enum class MasterFormat : uint8_t {
  split,    ///< bf16 weight and 16-bit remainder hold the float32 master exactly (split_master.h)
  float32,  ///< plain; gradients are float32 too
};

struct OptimizerSettings {
  OptimizerKind kind = OptimizerKind::adamw;
  StateFormat state = StateFormat::float32;
  MasterFormat master = MasterFormat::split;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double epsilon = 1e-8;
  double momentum = 0.9;  ///< of sgd; 0 keeps no state
  double adafactor_decay = 0.8;
  double weight_decay = 0.0;
  uint64_t seed = 0;  ///< of stochastic rounding
};

/// Parameters that share a scale in int8. Runs and chunks start at multiples of it.
inline constexpr uint64_t kStateBlock = 256;

/// Where the arrays of a chunk's state lie, as byte offsets from its start, in this order. An
/// absent array has no bytes. `exact` moments are float32 whatever the state: in int8 state those
/// of small tensors; adafactor's of rank 1, whose other tensors have none.
struct StateLayout {
  uint64_t remainder = 0;      ///< int16 per parameter; split master only
  uint64_t first = 0;          ///< exp_avg or momentum, per parameter
  uint64_t second = 0;         ///< exp_avg_sq, per parameter; adamw only
  uint64_t first_scales = 0;   ///< float32 per block of 256; int8 only
  uint64_t second_scales = 0;  ///< the same
  uint64_t exact_first = 0;    ///< float32 per exact parameter
  uint64_t exact_second = 0;   ///< the same
  uint64_t bytes = 0;          ///< of all of it

  /// The prefix that is not moments: what the first update reads.
  uint64_t remainder_bytes() const { return first; }
};
/// `parameters` is a multiple of 256; `exact` of them have exact moments (0 unless int8 or
/// adafactor).
StateLayout state_layout(const OptimizerSettings& settings, uint64_t parameters, uint64_t exact);

/// Parameters [begin, end) of a chunk that are updated alike: a tensor, or its part in the chunk.
/// Parameters in no run are frozen. begin is a multiple of 256; runs ascend.
struct UpdateRun {
  uint64_t begin, end;
  bool decay = true;         ///< weight decay applies
  uint32_t group = 0;        ///< learning-rate group
  bool exact = false;        ///< its moments are float32,
  uint64_t exact_begin = 0;  ///< from this element of exact_first and exact_second on
  FactoredMatrix matrix{};   ///< adafactor, unless exact
};

/// The scalars of one step, computed in float64 and rounded once.
struct UpdateStep {
  struct Group {
    float decay;      ///< 1 - lr * weight_decay; sgd: weight_decay
    float step_size;  ///< adamw: lr / (1 - beta1^t); else lr
  };
  std::vector<Group> groups;  ///< per learning-rate group
  float gradient_scale = 1;   ///< clip factor
  float beta1 = 0, beta2 = 0, one_minus_beta1 = 0, one_minus_beta2 = 0;  ///< sgd: beta1 is momentum
  float inverse_sqrt_bias2 = 0;
  float epsilon = 0;          ///< added to the root; adafactor: to the square
  uint64_t rounding_key = 0;  ///< of seed and t: differs from step to step
};
/// `step` counts from 1.
UpdateStep update_step(const OptimizerSettings& settings, std::span<const double> learning_rates,
                       uint64_t step, double gradient_scale);

struct UpdateChunk {
  std::byte* weight;          ///< bf16 or float32
  std::byte* state;           ///< laid out by state_layout
  const std::byte* gradient;  ///< bf16 or float32, as the master
  uint64_t parameters;
  uint64_t exact;                   ///< as given to state_layout
  uint64_t layer;                   ///< identity for stochastic rounding: the layer,
  uint64_t first;                   ///< and the chunk's first parameter in it (a multiple of 256)
  const float* averages = nullptr;  ///< of FactoredMoments, advanced to this step; adafactor
};

/// Updates the runs' parameters in one pass over the data, in parallel. With moments_zero the
/// moments are taken as zero and not read; those of frozen parameters are then written as zero.
void update_chunk(const OptimizerSettings& settings, const UpdateStep& step,
                  const UpdateChunk& chunk, std::span<const UpdateRun> runs, bool moments_zero);

}  // namespace overspill
