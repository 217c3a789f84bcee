// Whole rows by the kernel; the torn ones at both ends by hand.
#include "engine/model/factored_sums.h"

#include <algorithm>

namespace overspill {
namespace {

/// Part of one row: elements [first, last) of the matrix.
void add_torn_row(const float* values, uint64_t first, uint64_t last, uint64_t columns,
                  double* row_sums, double* column_sums) {
  for (uint64_t i = first; i < last; ++i) {
    const double square = static_cast<double>(values[i - first]) * values[i - first];
    row_sums[i / columns] += square;
    column_sums[i % columns] += square;
  }
}

}  // namespace

void add_part_squares(const Kernels& kernels, const float* gradients, uint64_t begin, uint64_t end,
                      const FactoredMatrix& m, const FactoredMoments& moments) {
  double* const rows = moments.sums + m.first;
  double* const columns = moments.sums + m.column_first();
  std::fill_n(rows, m.rows + m.columns, 0.0);
  const uint64_t size = m.rows * m.columns;
  // Elements of the matrix, from its first on.
  const uint64_t first = std::clamp(begin, m.offset, m.offset + size) - m.offset;
  const uint64_t last = std::clamp(end, m.offset, m.offset + size) - m.offset;
  if (first >= last) return;
  const float* const values = gradients + (m.offset + first - begin);
  const uint64_t whole = std::min(last, (first + m.columns - 1) / m.columns * m.columns);
  const uint64_t whole_rows = (last - whole) / m.columns;
  const uint64_t tail = whole + whole_rows * m.columns;
  if (whole_rows > 0) {
    kernels.row_column_squares(values + (whole - first), whole_rows, m.columns,
                               rows + whole / m.columns, columns);
  }
  add_torn_row(values, first, whole, m.columns, rows, columns);
  add_torn_row(values + (tail - first), tail, last, m.columns, rows, columns);
}

}  // namespace overspill
