// The vector kernels behind update_chunk: whole blocks of 256 parameters, one source for every
// instruction set (Google Highway), the best being chosen at run time. Internal to optim and its
// tests. Thread-safe but for force_update_target.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "optim/optimizer.h"

namespace overspill {

/// Consecutive whole blocks that are updated alike. Arrays that the formats lack are null.
struct UpdateBlocks {
  OptimizerKind kind;
  StateFormat state;  ///< of these blocks: float32 in an exact run
  MasterFormat master;
  bool momentum;  ///< sgd: has a first moment
  float decay, step_size, gradient_scale;
  float beta1, beta2, one_minus_beta1, one_minus_beta2;
  float inverse_sqrt_bias2, epsilon;
  uint64_t step_key, layer, first_block;  ///< of stochastic rounding: block in the layer
  uint64_t blocks;
  std::byte* weight;
  std::byte* remainder;
  const std::byte* gradient;
  std::byte* first;
  std::byte* second;
  float* first_scales;
  float* second_scales;
  const float* averages;  ///< adafactor: of FactoredMoments,
  FactoredMatrix matrix;  ///< no rows: the second moment is in `second`
  uint64_t element;       ///< of the matrix: the first parameter
};
void update_blocks(const UpdateBlocks& blocks);

/// Highway's numbers of the instruction sets compiled in that this processor has; the portable one
/// is always among them.
std::vector<int64_t> update_targets();
const char* update_target_name(int64_t target);
/// For tests: dispatches to this target only; 0 to the best again.
void force_update_target(int64_t target);

}  // namespace overspill
