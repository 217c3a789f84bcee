// One thread, in float64: a matrix has far fewer rows and columns than elements.
#include "optim/factored_moment.h"

#include <algorithm>
#include <limits>

#include "optim/optimizer.h"

namespace overspill {
namespace {

/// `size` averages over `count` elements each; returns their sum.
double advance(const UpdateStep& step, uint64_t size, uint64_t count, const double* sums,
               float* averages) {
  constexpr double kMost = std::numeric_limits<float>::max();
  const double scale = double{step.gradient_scale} * step.gradient_scale;
  double total = 0;
  for (uint64_t i = 0; i < size; ++i) {
    const double mean = sums[i] * scale / static_cast<double>(count) + step.epsilon;
    const double average = step.beta2 * double{averages[i]} + step.one_minus_beta2 * mean;
    averages[i] = static_cast<float>(std::min(average, kMost));
    total += averages[i];
  }
  return total;
}

}  // namespace

void advance_moment(const FactoredMoments& moments, const FactoredMatrix& m,
                    const UpdateStep& step) {
  const auto advance_from = [&](uint64_t first, uint64_t size, uint64_t count) {
    return advance(step, size, count, moments.sums + first, moments.averages + first);
  };
  const double total = advance_from(m.first, m.rows, m.columns);
  advance_from(m.column_first(), m.columns, m.rows);
  moments.averages[m.mean()] = static_cast<float>(total / static_cast<double>(m.rows));
}

}  // namespace overspill
