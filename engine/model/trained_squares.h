// The squares of a layer's gradient sums, as the global norm adds them up.
#pragma once

#include <algorithm>

#include "engine/model/kernels.h"
#include "engine/model/layers.h"

namespace overspill {

/// Trainable tensor by tensor in float64, of the layer's parameters [begin, end), whose first
/// `sums` points to.
inline double trained_squares(const Kernels& kernels, const LayerShape& layer, const float* sums,
                              uint64_t begin, uint64_t end) {
  double sum = 0;
  for (const LayerTensor& tensor : layer.tensors) {
    const uint64_t first = std::max(tensor.offset, begin);
    const uint64_t last = std::min(tensor.offset + tensor.elements, end);
    if (!tensor.trainable || first >= last) continue;
    sum += kernels.sum_of_squares(sums + (first - begin), last - first);
  }
  return sum;
}

}  // namespace overspill
