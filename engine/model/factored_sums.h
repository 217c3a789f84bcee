// Row and column sums of the squared gradient, for Adafactor, where a rank holds only a part of a
// matrix. Pure functions.
#pragma once

#include "engine/model/kernels.h"
#include "optim/factored_moment.h"

namespace overspill {

/// Sets the matrix's sums to those of its elements among a layer's parameters [begin, end), whose
/// first `gradients` points to.
void add_part_squares(const Kernels& kernels, const float* gradients, uint64_t begin, uint64_t end,
                      const FactoredMatrix& matrix, const FactoredMoments& moments);

}  // namespace overspill
