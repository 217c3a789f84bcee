// Cross-entropy and its gradient against float64. Bounds: losses 2^-20 of themselves or of 1;
// gradients 2^-20 of the scale, and half a unit of bf16's last place where that is stored.
#include "engine/model/cuda_kernels.h"
#include "tests/emulation/kernel_fixture.h"

namespace overspill {
namespace {

using namespace test;

class LossKernels : public KernelTest {};
INSTANTIATE_SEEDS(LossKernels);

constexpr float kScale = 0.25f;

struct Case {
  size_t rows, vocabulary, misalign = 0;
  bool masked = false;  ///< every second row is not trained on
};

/// The row's loss; logits become the gradient.
double reference(std::span<double> logits, int32_t target_id) {
  if (target_id == kNotTrained) {
    std::ranges::fill(logits, 0.0);
    return 0;
  }
  const auto target = static_cast<size_t>(target_id);
  double maximum = -INFINITY, sum = 0;
  for (const double x : logits) maximum = std::max(maximum, x);
  for (const double x : logits) sum += std::exp(x - maximum);
  const double loss = std::log(sum) + maximum - logits[target];
  for (double& x : logits) x = kScale * std::exp(x - maximum) / sum;
  logits[target] -= kScale;
  return loss;
}

template <class T>
void check(const Case& c) {
  const Array<T> logits = normals<T>(1, c.rows * c.vocabulary, 3, c.misalign * sizeof(T));
  const Array<int32_t> targets(c.rows);
  for (size_t r = 0; r < c.rows; ++r) {
    targets[r] = static_cast<int32_t>(random_below(2, r, c.vocabulary));
    // What is common to a row must not matter.
    const float offset = std::vector<float>{0, 80, 1000, -1000}[r % 4];
    for (size_t i = 0; i < c.vocabulary; ++i) {
      T& logit = logits[r * c.vocabulary + i];
      logit = static_cast<T>(static_cast<float>(logit) + offset);
    }
  }
  targets[0] = static_cast<int32_t>(c.vocabulary - 1);
  for (size_t r = 1; c.masked && r < c.rows; r += 2) targets[r] = kNotTrained;
  Doubles want = logits.values(), want_loss;
  for (size_t r = 0; r < c.rows; ++r) {
    want_loss.push_back(
        reference(std::span(want).subspan(r * c.vocabulary, c.vocabulary), targets[r]));
  }
  const Array<float> alone(c.rows), loss(c.rows);
  const Doubles before = logits.values();
  cuda::cross_entropy(nullptr, logits.data(), targets.data(), 0.0f, alone.data(), c.rows,
                      c.vocabulary);
  expect_close(logits, before, {});
  cuda::cross_entropy(nullptr, logits.data(), targets.data(), kScale, loss.data(), c.rows,
                      c.vocabulary);
  for (size_t r = 0; r < c.rows; ++r) {
    ASSERT_NEAR(loss[r], want_loss[r], 0x1p-20 * (1 + std::abs(want_loss[r])));
    ASSERT_EQ(loss[r], alone[r]);
  }
  const double rounding = sizeof(T) == 2 ? 0x1p-8 : 0;
  for (size_t i = 0; i < want.size(); ++i) {
    const double got = static_cast<float>(logits[i]);
    ASSERT_NEAR(got, want[i], 0x1p-20 * kScale + rounding * std::abs(want[i])) << i;
  }
}

TEST_P(LossKernels, CrossEntropyAndItsGradient) {
  for (const Case& c :
       std::vector<Case>{{1, 1}, {5, 2}, {5, 17}, {4, 1003}, {3, 4104}, {4, 96, 1}}) {
    check<float>(c);
    check<bf16>(c);
  }
}

TEST_P(LossKernels, TokensThatAreNotTrained) {
  for (const Case& c :
       std::vector<Case>{{2, 1, 0, true}, {5, 17, 0, true}, {3, 4104, 0, true}, {4, 96, 1, true}}) {
    check<float>(c);
    check<bf16>(c);
  }
}

TEST_P(LossKernels, LargeVocabulary) {
  check<bf16>({2, 128256});
  check<float>({1, 50257});
}

TEST_P(LossKernels, MaskedLogits) {
  const Array<float> logits(1024), loss(1);
  logits.fill(-INFINITY);
  logits[900] = -500;
  logits[901] = -500;
  const Array<int32_t> target(std::vector<int>{901}, 0);
  cuda::cross_entropy(nullptr, logits.data(), target.data(), 1.0f, loss.data(), 1, 1024);
  EXPECT_NEAR(loss[0], std::log(2.0), 1e-6);
  EXPECT_EQ(logits[0], 0);
  EXPECT_NEAR(logits[901], -0.5, 1e-6);
}

TEST_P(LossKernels, NanIsNotHidden) {
  const Array<bf16> logits = normals<bf16>(1, 512);
  const Array<float> loss(1);
  logits[77] = std::numeric_limits<float>::quiet_NaN();
  const Array<int32_t> target(std::vector<int>{3}, 0);
  cuda::cross_entropy(nullptr, logits.data(), target.data(), 1.0f, loss.data(), 1, 512);
  EXPECT_TRUE(std::isnan(loss[0]));
}

}  // namespace
}  // namespace overspill
