// The factored second moment of Adafactor: for a matrix of R x C, averages of the squared gradient
// over each row and over each column instead of one per parameter. They are advanced once a step,
// from sums over the whole matrix, so that no bit depends on chunks or placement. Pure functions.
#pragma once

#include <cstdint>

namespace overspill {

struct UpdateStep;

/// A matrix in a layer, and its part of the run's FactoredMoments.
struct FactoredMatrix {
  uint64_t offset = 0;  ///< its first parameter, in the layer
  uint64_t rows = 0, columns = 0;
  uint64_t first = 0;  ///< element: R of the rows, C of the columns, and the rows' mean

  uint64_t column_first() const { return first + rows; }
  uint64_t mean() const { return first + rows + columns; }
  /// Elements taken, a multiple of 16: whole cache lines.
  uint64_t elements() const { return (rows + columns + 1 + 15) / 16 * 16; }
};

/// Two arrays of as many elements, over all matrices of a run.
struct FactoredMoments {
  double* sums = nullptr;     ///< of this step's squared gradients, before clipping
  float* averages = nullptr;  ///< zero before the first update
};
inline constexpr uint64_t kFactoredElementBytes = sizeof(double) + sizeof(float);

/// average = b average + (1-b) (sum * clip^2 / count + eps), and the mean of the rows' averages.
void advance_moment(const FactoredMoments& moments, const FactoredMatrix& matrix,
                    const UpdateStep& step);

}  // namespace overspill
