// Sums over rows and columns of a part of a matrix: the host's bits.
#include "engine/model/cuda_kernels.h"
#include "engine/model/factored_sums.h"
#include "tests/emulation/kernel_fixture.h"

namespace overspill {
namespace {

using namespace test;

class FactoredKernels : public KernelTest {};
INSTANTIATE_SEEDS(FactoredKernels);

/// Values over many powers of two, so that every change of order shows.
std::vector<float> spread(uint64_t key, uint64_t size) {
  std::vector<float> values;
  for (uint64_t i = 0; i < size; ++i) {
    const auto exponent = static_cast<int>(random_below(key, i, 24)) - 12;
    values.push_back(std::ldexp(random_normal(key, i), exponent));
  }
  return values;
}

void check(const FactoredMatrix& m, uint64_t begin, uint64_t end, uint64_t key) {
  SCOPED_TRACE(testing::Message() << m.rows << "x" << m.columns << " at " << m.offset << ", part "
                                  << begin << " to " << end);
  const Array<float> gradients(spread(key, end - begin), 0);
  Doubles sums(m.first + m.elements());
  add_part_squares(host_kernels(), gradients.data(), begin, end, m, {sums.data(), nullptr});
  const Array<double> got(m.rows + m.columns);
  const Array<std::byte> workspace(cuda::row_column_squares_workspace_bytes(m.rows, m.columns));
  cuda::add_part_squares(nullptr, gradients.data(), begin, end, m, got.data(), workspace.data());
  for (uint64_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(got[i], sums[m.first + i]) << (i < m.rows ? "row " : "row count and column ") << i;
  }
}

TEST_P(FactoredKernels, WholeMatrices) {
  constexpr uint64_t kShapes[][2] = {{1, 1},   {1, 300}, {300, 1},  {3, 15},  {31, 16},
                                     {32, 17}, {33, 33}, {65, 257}, {200, 3}, {100, 530}};
  for (const auto& [rows, columns] : kShapes) {
    const FactoredMatrix m{.offset = 64, .rows = rows, .columns = columns, .first = 32};
    check(m, 0, m.offset + rows * columns + 5, GetParam());
    check(m, m.offset, m.offset + rows * columns, GetParam());
  }
}

TEST_P(FactoredKernels, PartsOfMatrices) {
  const FactoredMatrix m{.offset = 100, .rows = 40, .columns = 37};
  const uint64_t end = m.offset + m.rows * m.columns, third_row = m.offset + 2 * m.columns;
  check(m, 0, m.offset, 1);                     // before it
  check(m, end, end + 10, 1);                   // behind it
  check(m, third_row, third_row + 37, 1);       // one row
  check(m, third_row, third_row + 20, 1);       // its front,
  check(m, third_row + 20, third_row + 37, 1);  // its back,
  check(m, third_row + 5, third_row + 20, 1);   // its middle
  check(m, third_row + 20, third_row + 40, 1);  // of two rows
  check(m, third_row + 20, third_row + 37 + 37 + 10, 1);
  for (uint64_t i = 0; i < 30; ++i) {
    const uint64_t from = random_below(GetParam(), 2 * i, end + 50);
    const uint64_t size = random_below(GetParam(), 2 * i + 1, end + 50 - from);
    check(m, from, from + size, i);
  }
}

}  // namespace
}  // namespace overspill
