// Every layer kind's forward against the float64 reference and its gradients against central finite
// differences of that reference.
//
// Tolerance: the engine computes in float32 (unit roundoff 6e-8); a gradient element is a sum of a
// few hundred to a few thousand products, whose error grows with the square root of their number
// and relative to the largest terms, not to a sum that cancels. So errors are measured against the
// largest element of the tensor's gradient, and kTolerance = 1e-5 is 170 roundoffs. The finite
// differences themselves are good to 1e-7: h^2 |f'''| / 6 with h = 3e-5, plus 1e-16 |f| / h.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>

#include "tests/unit/engine/model/llama_under_test.h"

namespace overspill {
namespace {

using namespace test;

constexpr double kTolerance = 1e-5;
constexpr double kStep = 3e-5;

double largest(const float* values, size_t size) {
  double most = 0;
  for (size_t i = 0; i < size; ++i) {
    most = std::isnan(values[i]) ? NAN : std::max(most, std::abs(static_cast<double>(values[i])));
    if (std::isnan(most)) return most;
  }
  return most;
}

void expect_close(const std::vector<float>& got, const Doubles& want, double tolerance = 2e-6) {
  ASSERT_EQ(got.size(), want.size());
  double scale = 0;
  for (const double value : want) scale = std::max(scale, std::abs(value));
  for (size_t i = 0; i < want.size(); ++i) {
    ASSERT_NEAR(got[i], want[i], tolerance * scale) << "element " << i;
  }
}

/// Compares `gradient` with differences of f, which reads `values`: at `samples` coordinates, and
/// along one random direction, which no element escapes.
void expect_gradient(const std::string& name, Doubles& values, const float* gradient,
                     size_t samples, const std::function<double()>& f) {
  SCOPED_TRACE(name);
  const size_t size = values.size();
  const double most = largest(gradient, size);
  ASSERT_GT(most, 0) << "no gradient, or NaN in it";
  // Gradients that are exactly zero (queries and keys of one-token sequences) are left with the
  // roundoff of their terms, which are of order 1 in these tests.
  const double scale = std::max(most, 0.1);
  const Doubles kept = values;
  for (size_t sample = 0; sample < samples; ++sample) {
    const size_t i = sample == 0 ? 0 : sample == 1 ? size - 1 : random_below(77, sample, size);
    values[i] = kept[i] + kStep;
    const double above = f();
    values[i] = kept[i] - kStep;
    const double below = f();
    values[i] = kept[i];
    ASSERT_NEAR(gradient[i], (above - below) / (2 * kStep), kTolerance * scale) << "element " << i;
  }
  double norm = 0, along = 0, squares = 0;
  for (size_t i = 0; i < size; ++i) norm += std::pow(random_normal(78, i), 2);
  const auto direction = [&](size_t i) { return random_normal(78, i) / std::sqrt(norm); };
  for (size_t i = 0; i < size; ++i) {
    along += gradient[i] * direction(i);
    squares += std::pow(gradient[i], 2);
  }
  const auto at = [&](double step) {
    for (size_t i = 0; i < size; ++i) values[i] = kept[i] + step * direction(i);
    return f();
  };
  const double difference = (at(kStep) - at(-kStep)) / (2 * kStep);
  values = kept;
  ASSERT_NEAR(along, difference, kTolerance * std::max(std::sqrt(squares), 0.1))
      << "along a random direction";
}

const ReferenceSizes kGrouped = {
    .hidden = 40, .ffn = 52, .heads = 6, .kv_heads = 2, .head_dim = 8, .vocabulary = 53};
const ReferenceSizes kMultiHead = {
    .hidden = 21, .ffn = 35, .heads = 3, .kv_heads = 3, .head_dim = 10, .vocabulary = 37};
const ReferenceSizes kSmall = {
    .hidden = 12, .ffn = 18, .heads = 2, .kv_heads = 1, .head_dim = 6, .vocabulary = 50};
const ReferenceSizes kScaled = {.hidden = 24,
                                .ffn = 20,
                                .heads = 2,
                                .kv_heads = 1,
                                .head_dim = 16,
                                .vocabulary = 31,
                                .eps = 1e-6,
                                .rope_theta = 500,
                                .llama3_scaling = true,
                                .factor = 4,
                                .low_freq_factor = 1,
                                .high_freq_factor = 4,
                                .original_context = 48};
const ReferenceSizes kWideVocabulary = {
    .hidden = 3, .ffn = 4, .heads = 1, .kv_heads = 1, .head_dim = 2, .vocabulary = 128256};

std::string case_name(const testing::TestParamInfo<LlamaCase>& param) { return param.param.name; }

class BlockGradient : public testing::TestWithParam<LlamaCase> {
 protected:
  const LlamaCase& c = GetParam();
  LlamaUnderTest engine{c};
  const LayerShape& shape = engine.model.layers[1];
  const std::vector<float> weights = layer_weights(shape, 1);
  const std::vector<float> x = normals(2, c.tokens() * c.sizes.hidden);
};

TEST_P(BlockGradient, ForwardAgreesWithReference) {
  std::vector<float> y = nans(x.size());
  engine.llama.block(1, weights.data(), nullptr, x.data(), y.data());
  expect_close(
      y, reference_block(c.sizes, reference_weights(shape, weights), doubles_of(x), c.length));
}

TEST_P(BlockGradient, AgreesWithFiniteDifferences) {
  const std::vector<float> dy = normals(3, x.size());
  std::vector<float> dx = dy, sums = nans(shape.padded);
  engine.llama.block_backward(1, weights.data(), nullptr, x.data(), dx.data(), sums.data(), true);

  ReferenceBlock reference = reference_weights(shape, weights);
  Doubles input = doubles_of(x);
  const auto f = [&] {
    const Doubles y = reference_block(c.sizes, reference, input, c.length);
    double sum = 0;
    for (size_t i = 0; i < y.size(); ++i) sum += y[i] * dy[i];
    return sum;
  };
  const size_t samples = c.tokens() > 200 ? 8 : 30;
  Doubles* tensors[kBlockTensors] = {
      &reference.input_norm,    &reference.query,     &reference.key,  &reference.value,
      &reference.attention_out, &reference.post_norm, &reference.gate, &reference.up,
      &reference.down};
  for (uint32_t i = 0; i < kBlockTensors; ++i) {
    const LayerTensor& tensor = shape.tensors[i];
    expect_gradient(tensor.name, *tensors[i], sums.data() + tensor.offset, samples, f);
  }
  expect_gradient("input", input, dx.data(), samples, f);
}

INSTANTIATE_TEST_SUITE_P(Shapes, BlockGradient,
                         testing::Values(LlamaCase{"GroupedTwoSequences", kGrouped, false, 2, 70},
                                         LlamaCase{"MultiHeadOddSizes", kMultiHead, false, 1, 65},
                                         LlamaCase{"Llama3Scaling", kScaled, false, 1, 97},
                                         LlamaCase{"BeyondKeyBlock", kSmall, false, 1, 270},
                                         LlamaCase{"WholeBlocks", kSmall, false, 1, 128},
                                         LlamaCase{"OneToken", kGrouped, false, 3, 1}),
                         case_name);

struct HeadRun {
  std::vector<float> dx, sums, embedding_sums;
  double loss;
};

class HeadGradient : public testing::TestWithParam<LlamaCase> {
 protected:
  HeadRun run(const LlamaUnderTest& on, const void* head, const void* table, bool backward) const {
    HeadRun r{nans(x.size()), nans(engine.head().padded), nans(engine.model.layers[0].padded), 0};
    const Llama::Head h{.weights = head,
                        .embedding = c.tied ? table : nullptr,
                        .sums = backward ? r.sums.data() : nullptr,
                        .embedding_sums = c.tied && backward ? r.embedding_sums.data() : nullptr,
                        .first = true};
    r.loss = on.llama.loss(h, x.data(), targets.data(), kScale, backward ? r.dx.data() : nullptr);
    return r;
  }
  Doubles projection() const {
    return c.tied ? tensor_of(engine.model.layers[0], 0, table)
                  : tensor_of(engine.head(), kOutput, weights);
  }

  static constexpr float kScale = 0.25f;
  const LlamaCase& c = GetParam();
  LlamaUnderTest engine{c};
  const std::vector<float> weights = layer_weights(engine.head(), 4);
  const std::vector<float> table = layer_weights(engine.model.layers[0], 5);
  const std::vector<float> x = normals(6, c.tokens() * c.sizes.hidden, 2);
  const std::vector<int32_t> targets = random_tokens(7, c.tokens(), c.sizes.vocabulary);
};

TEST_P(HeadGradient, LossAndLogitsAgreeWithReference) {
  const Doubles norm = tensor_of(engine.head(), kFinalNorm, weights), output = projection();
  double want = 0;
  for (const double loss : reference_losses(c.sizes, norm, output, doubles_of(x), targets)) {
    want += loss;
  }
  const HeadRun training = run(engine, weights.data(), table.data(), true);
  const HeadRun scoring = run(engine, weights.data(), table.data(), false);
  EXPECT_NEAR(training.loss, want, 1e-6 * want);
  EXPECT_EQ(training.loss, scoring.loss);

  std::vector<float> logits = nans(c.tokens() * c.sizes.vocabulary);
  engine.llama.logits({weights.data(), c.tied ? table.data() : nullptr, nullptr, nullptr, false},
                      x.data(), logits.data());
  const size_t last = c.tokens() - 1;
  expect_close({logits.end() - static_cast<ptrdiff_t>(c.sizes.vocabulary), logits.end()},
               reference_logits(c.sizes, norm, output, &doubles_of(x)[last * c.sizes.hidden]));
}

TEST_P(HeadGradient, AgreesWithFiniteDifferences) {
  const HeadRun got = run(engine, weights.data(), table.data(), true);
  Doubles norm = tensor_of(engine.head(), kFinalNorm, weights), output = projection();
  Doubles input = doubles_of(x);
  const auto f = [&] {
    double sum = 0;
    for (const double loss : reference_losses(c.sizes, norm, output, input, targets)) sum += loss;
    return kScale * sum;
  };
  const size_t samples = c.sizes.vocabulary > 1000 ? 4 : 30;
  expect_gradient("norm", norm, got.sums.data(), samples, f);
  expect_gradient(
      "output", output,
      c.tied ? got.embedding_sums.data() : got.sums.data() + engine.head().tensors[kOutput].offset,
      samples, f);
  expect_gradient("input", input, got.dx.data(), samples, f);
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, HeadGradient,
    testing::Values(LlamaCase{"Untied", kGrouped, false, 2, 70},
                    LlamaCase{"Tied", kMultiHead, true, 1, 65},
                    LlamaCase{"MoreTokensThanLossRows", kSmall, false, 1, 300},
                    // 16 MiB of logits are 32 rows of this vocabulary: chunks of 32 and 3.
                    LlamaCase{"WideVocabularyUntied", kWideVocabulary, false, 1, 35},
                    LlamaCase{"WideVocabularyTied", kWideVocabulary, true, 1, 35},
                    LlamaCase{"OneToken", kGrouped, true, 3, 1}),
    case_name);

}  // namespace
}  // namespace overspill
