// Embedding lookup, and its gradient in row order: float32 sums bit for bit.
#include "engine/model/cuda_kernels.h"
#include "tests/emulation/kernel_fixture.h"

namespace overspill {
namespace {

using namespace test;

class EmbeddingKernels : public KernelTest {};
INSTANTIATE_SEEDS(EmbeddingKernels);

struct Case {
  size_t rows, d, vocabulary, misalign = 0;
};
const Case kCases[] = {{1, 8, 1},    {1, 3, 5},     {40, 16, 3},    {33, 1032, 50},
                       {100, 24, 1}, {70, 8, 1000}, {3, 8, 128256}, {9, 16, 4, 1}};

template <class T>
void check(const Case& c) {
  const size_t misalign = c.misalign * sizeof(T);
  const Array<int32_t> tokens(c.rows);
  for (size_t r = 0; r < c.rows; ++r) {
    tokens[r] = static_cast<int32_t>(random_below(7, r, c.vocabulary));
  }
  tokens[c.rows - 1] = static_cast<int32_t>(c.vocabulary - 1);
  const Array<T> table = normals<T>(1, c.vocabulary * c.d, 1, misalign);
  const Array<T> y(c.rows * c.d, misalign), dy = normals<T>(2, c.rows * c.d, 1, misalign);
  cuda::embed(nullptr, tokens.data(), table.data(), y.data(), c.rows, c.d);
  for (size_t i = 0; i < y.size(); ++i) {
    const size_t at = static_cast<size_t>(tokens[i / c.d]) * c.d + i % c.d;
    ASSERT_EQ(static_cast<float>(y[i]), static_cast<float>(table[at]));
  }
  const Array<float> sums = normals<float>(3, c.vocabulary * c.d);
  const Array<std::byte> workspace(cuda::embed_gradient_workspace_bytes(c.rows));
  std::vector<float> want(sums.data(), sums.data() + sums.size());
  for (size_t i = 0; i < dy.size(); ++i) {
    want[static_cast<size_t>(tokens[i / c.d]) * c.d + i % c.d] += static_cast<float>(dy[i]);
  }
  cuda::embed_gradient(nullptr, tokens.data(), dy.data(), sums.data(), workspace.data(), c.rows,
                       c.d);
  EXPECT_EQ(std::memcmp(sums.data(), want.data(), want.size() * sizeof(float)), 0);
}

TEST_P(EmbeddingKernels, LookupAndGradient) {
  for (const Case& c : kCases) {
    SCOPED_TRACE(testing::Message() << c.rows << " rows of " << c.d);
    check<float>(c);
    check<bf16>(c);
  }
}

}  // namespace
}  // namespace overspill
