// Sums in float64 against float64: 2^-44 of themselves.
#include "engine/model/cuda_kernels.h"
#include "tests/emulation/kernel_fixture.h"

namespace overspill {
namespace {

using namespace test;

class ReductionKernels : public KernelTest {};
INSTANTIATE_SEEDS(ReductionKernels);

template <class T>
void check_squares(size_t size, size_t misalign) {
  const Array<T> x = normals<T>(1, size, 1, misalign);
  const Array<std::byte> workspace(cuda::sum_of_squares_workspace_bytes(size));
  const Array<double> total(1);
  double want = 0;
  for (const double value : x.values()) want += value * value;
  cuda::sum_of_squares(nullptr, x.data(), size, total.data(), false, workspace.data());
  EXPECT_NEAR(total[0], want, 0x1p-44 * want) << size;
  cuda::sum_of_squares(nullptr, x.data(), size, total.data(), true, workspace.data());
  EXPECT_NEAR(total[0], 2 * want, 0x1p-43 * want) << size;
}

TEST_P(ReductionKernels, SumOfSquares) {
  for (const size_t size : {0, 1, 7, 9, 4096, 4097, 8195, 30001}) {
    check_squares<float>(size, 0);
    check_squares<bf16>(size, 0);
    check_squares<float>(size, 4);
    check_squares<bf16>(size, 2);
  }
}

TEST_P(ReductionKernels, SumOfSquaresShowsNan) {
  const Array<float> x = normals<float>(1, 5000);
  x[4321] = std::numeric_limits<float>::quiet_NaN();
  const Array<std::byte> workspace(cuda::sum_of_squares_workspace_bytes(5000));
  const Array<double> total(1);
  cuda::sum_of_squares(nullptr, x.data(), 5000, total.data(), false, workspace.data());
  EXPECT_TRUE(std::isnan(total[0]));
}

TEST_P(ReductionKernels, Sum) {
  for (const size_t size : {0, 1, 255, 257, 3000}) {
    const Array<float> x = normals<float>(1, size);
    const Array<double> total(1);
    double want = 0, magnitude = 0;
    for (const double value : x.values()) want += value, magnitude += std::abs(value);
    cuda::sum(nullptr, x.data(), size, total.data(), false);
    EXPECT_NEAR(total[0], want, 0x1p-44 * magnitude);
    cuda::sum(nullptr, x.data(), size, total.data(), true);
    EXPECT_NEAR(total[0], 2 * want, 0x1p-43 * magnitude);
  }
}

TEST_P(ReductionKernels, RowAndColumnSquares) {
  const std::pair<size_t, size_t> shapes[] = {{1, 1}, {3, 300}, {64, 7}, {65, 257}, {200, 3}};
  for (const auto& [rows, columns] : shapes) {
    const Array<float> x = normals<float>(1, rows * columns);
    const Array<double> row_sums(rows), column_sums(columns);
    const Array<std::byte> workspace(cuda::row_column_squares_workspace_bytes(rows, columns));
    Doubles want_rows(rows), want_columns(columns);
    for (size_t i = 0; i < x.size(); ++i) {
      const double square = double{x[i]} * x[i];
      want_rows[i / columns] += square;
      want_columns[i % columns] += square;
    }
    cuda::row_column_squares(nullptr, x.data(), rows, columns, row_sums.data(), column_sums.data(),
                             workspace.data());
    for (size_t r = 0; r < rows; ++r) {
      EXPECT_NEAR(row_sums[r], want_rows[r], 0x1p-44 * want_rows[r]);
    }
    for (size_t c = 0; c < columns; ++c) {
      EXPECT_NEAR(column_sums[c], want_columns[c], 0x1p-44 * want_columns[c]);
    }
  }
}

}  // namespace
}  // namespace overspill
