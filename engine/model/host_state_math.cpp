// Kernels of the host, by the names that the engine knows.
#include "engine/model/host_state_math.h"

#include <algorithm>

#include "engine/model/add_gradient.h"
#include "engine/model/factored_sums.h"

namespace overspill {

void HostStateMath::square_sum(uint32_t layer, const float* sums, uint64_t begin, uint64_t end,
                               double* total) const {
  double sum = 0;
  for (const LayerTensor& tensor : model_.layers[layer].tensors) {
    const uint64_t first = std::max(tensor.offset, begin);
    const uint64_t last = std::min(tensor.offset + tensor.elements, end);
    if (!tensor.trainable || first >= last) continue;
    sum += kernels_.sum_of_squares(sums + (first - begin), last - first);
  }
  *total = sum;
}

void HostStateMath::factored_sums(const float* sums, uint64_t begin, uint64_t end,
                                  const FactoredMatrix& matrix,
                                  const FactoredMoments& moments) const {
  add_part_squares(kernels_, sums, begin, end, matrix, moments);
}

void HostStateMath::round_gradient(const float* sums, uint16_t* gradient, uint64_t size) const {
  kernels_.float_to_bf16(sums, gradient, size);
}

void HostStateMath::update(const OptimizerSettings& settings, const UpdateStep& step,
                           const UpdateChunk& chunk, std::span<const UpdateRun> runs,
                           bool moments_zero) const {
  update_chunk(settings, step, chunk, runs, moments_zero);
}

void HostStateMath::add_gradient(void*, const void* gradient, DType type, float* sums,
                                 uint64_t size, bool first) const {
  overspill::add_gradient(gradient, type, sums, size, first);
}

}  // namespace overspill
