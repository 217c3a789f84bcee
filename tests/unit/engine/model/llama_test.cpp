// What Llama's calls promise beside their mathematics (gradient_test.cpp): accumulation over
// micro-batches, zeroed padding, bf16 weights, no dependence on what memory held, and the whole
// model's gradient, through which a tied embedding gets both of its parts.
#include "engine/model/llama.h"

#include <gtest/gtest.h>

#include <cstring>

#include "tests/unit/engine/model/llama_under_test.h"

namespace overspill {
namespace {

using namespace test;

const ReferenceSizes kSizes = {
    .hidden = 40, .ffn = 52, .heads = 6, .kv_heads = 2, .head_dim = 8, .vocabulary = 53};
const LlamaCase kUntied = {"untied", kSizes, false, 2, 33};
const LlamaCase kTied = {"tied", kSizes, true, 2, 33};

/// Everything that one pass over one micro-batch computes, layer by layer on made-up inputs.
struct Outputs {
  std::vector<float> embedded, y, dx, block_sums, head_dx, head_sums, table_sums;
  double loss = 0;
};

struct Weights {
  std::vector<float> table, block, head;
  explicit Weights(const ModelShape& model)
      : table(layer_weights(model.layers[0], 1)),
        block(layer_weights(model.layers[1], 2)),
        head(layer_weights(model.layers.back(), 3)) {}
};

Outputs blank(const LlamaUnderTest& engine, const LlamaCase& c) {
  const auto boundary = nans(c.tokens() * c.sizes.hidden);
  return {boundary,
          boundary,
          boundary,
          nans(engine.model.layers[1].padded),
          boundary,
          nans(engine.head().padded),
          nans(engine.model.layers[0].padded),
          0};
}

/// `seed` chooses the micro-batch; `first` starts the sums of `out` from zero.
void pass(const LlamaUnderTest& engine, const LlamaCase& c, const void* table, const void* block,
          const void* head, uint64_t seed, bool first, Outputs& out) {
  const std::vector<int32_t> tokens = random_tokens(seed, c.tokens(), c.sizes.vocabulary);
  const std::vector<int32_t> targets = random_tokens(seed + 1, c.tokens(), c.sizes.vocabulary);
  const std::vector<float> x = normals(seed + 2, c.tokens() * c.sizes.hidden);
  engine.llama.embed(table, tokens.data(), out.embedded.data());
  engine.llama.block(1, block, nullptr, x.data(), out.y.data());
  const Llama::Head h{.weights = head,
                      .embedding = c.tied ? table : nullptr,
                      .sums = out.head_sums.data(),
                      .embedding_sums = c.tied ? out.table_sums.data() : nullptr,
                      .first = first};
  out.loss = engine.llama.loss(h, x.data(), targets.data(), 0.5f, out.head_dx.data());
  out.dx = normals(seed + 3, x.size());
  engine.llama.block_backward(1, block, nullptr, x.data(), out.dx.data(), out.block_sums.data(),
                              first);
  engine.llama.embed_backward(tokens.data(), out.dx.data(), out.table_sums.data(),
                              first && !c.tied);
}

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

void expect_same(const Outputs& a, const Outputs& b) {
  EXPECT_TRUE(same_bits(a.embedded, b.embedded));
  EXPECT_TRUE(same_bits(a.y, b.y));
  EXPECT_TRUE(same_bits(a.dx, b.dx));
  EXPECT_TRUE(same_bits(a.block_sums, b.block_sums));
  EXPECT_TRUE(same_bits(a.head_dx, b.head_dx));
  EXPECT_TRUE(same_bits(a.head_sums, b.head_sums));
  EXPECT_TRUE(same_bits(a.table_sums, b.table_sums));
  EXPECT_EQ(a.loss, b.loss);
}

Outputs run(const LlamaUnderTest& engine, const LlamaCase& c, const Weights& w) {
  Outputs out = blank(engine, c);
  pass(engine, c, w.table.data(), w.block.data(), w.head.data(), 10, true, out);
  return out;
}

void expect_sum(const LayerShape& shape, const std::vector<float>& both,
                const std::vector<float>& first, const std::vector<float>& second) {
  for (const LayerTensor& tensor : shape.tensors) {
    SCOPED_TRACE(tensor.name);
    double scale = 0;
    for (size_t i = tensor.offset; i < tensor.offset + tensor.elements; ++i) {
      scale = std::max(scale, std::abs(static_cast<double>(both[i])));
    }
    for (size_t i = tensor.offset; i < tensor.offset + tensor.elements; ++i) {
      ASSERT_NEAR(both[i], double{first[i]} + second[i], 1e-6 * scale) << i;
    }
  }
}

TEST(Llama, GradientsAddUpOverMicroBatches) {
  for (const LlamaCase& c : {kUntied, kTied}) {
    SCOPED_TRACE(c.name);
    const LlamaUnderTest engine(c);
    const Weights w(engine.model);
    Outputs both = blank(engine, c), first = both, second = both;
    const auto go = [&](uint64_t seed, bool start, Outputs& out) {
      pass(engine, c, w.table.data(), w.block.data(), w.head.data(), seed, start, out);
    };
    go(10, true, both);
    go(20, false, both);
    go(10, true, first);
    go(20, true, second);
    EXPECT_FALSE(same_bits(first.block_sums, second.block_sums));
    expect_sum(engine.model.layers[0], both.table_sums, first.table_sums, second.table_sums);
    expect_sum(engine.model.layers[1], both.block_sums, first.block_sums, second.block_sums);
    expect_sum(engine.head(), both.head_sums, first.head_sums, second.head_sums);
    EXPECT_TRUE(same_bits(both.dx, second.dx)) << "dx is each micro-batch's own";
  }
}

void expect_zero_padding(const LayerShape& shape, const std::vector<float>& sums) {
  std::vector<bool> padding(shape.padded, true);
  for (const LayerTensor& tensor : shape.tensors) {
    std::fill_n(padding.begin() + static_cast<ptrdiff_t>(tensor.offset), tensor.elements, false);
  }
  size_t count = 0;
  for (size_t i = 0; i < sums.size(); ++i) {
    if (!padding[i]) continue;
    ++count;
    ASSERT_EQ(sums[i], 0.0f) << i;
  }
  EXPECT_GT(count, 0u);
}

TEST(Llama, PaddingOfSumsIsZeroedAndStaysZero) {
  for (const LlamaCase& c : {kUntied, kTied}) {
    const LlamaUnderTest engine(c);
    const Weights w(engine.model);
    Outputs out = run(engine, c, w);
    pass(engine, c, w.table.data(), w.block.data(), w.head.data(), 20, false, out);
    expect_zero_padding(engine.model.layers[0], out.table_sums);
    expect_zero_padding(engine.model.layers[1], out.block_sums);
    expect_zero_padding(engine.head(), out.head_sums);
  }
}

TEST(Llama, ResultsDoNotDependOnWhatScratchHeld) {
  for (const LlamaCase& c : {kUntied, kTied}) {
    const LlamaUnderTest nan(c), zero(c, DType::f32, 0), large(c, DType::f32, 0x7e);
    const Weights w(nan.model);
    const Outputs want = run(zero, c, w);
    EXPECT_TRUE(std::isfinite(want.loss));
    expect_same(run(nan, c, w), want);
    expect_same(run(large, c, w), want);
    expect_same(run(large, c, w), want);  // what the last pass left behind
  }
}

std::vector<uint16_t> round_to_bf16(std::vector<float>& values) {
  std::vector<uint16_t> narrow(values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    narrow[i] = float_to_bf16(values[i]);
    values[i] = bf16_to_float(narrow[i]);
  }
  return narrow;
}

TEST(Llama, Bf16WeightsComputeAsTheSameWeightsInFloat32) {
  for (const LlamaCase& c : {kUntied, kTied}) {
    const LlamaUnderTest wide(c), narrow(c, DType::bf16);
    Weights w(wide.model);
    const auto table = round_to_bf16(w.table), block = round_to_bf16(w.block),
               head = round_to_bf16(w.head);
    Outputs out = blank(narrow, c);
    pass(narrow, c, table.data(), block.data(), head.data(), 10, true, out);
    expect_same(out, run(wide, c, w));
  }
}

TEST(Llama, GradientSquareSumLeavesPaddingOut) {
  const LlamaUnderTest engine(kUntied);
  const LayerShape& shape = engine.model.layers[1];
  const std::vector<float> sums = layer_weights(shape, 5);  // NaN in the padding
  double want = 0;
  for (const float value : sums) want += std::isnan(value) ? 0 : double{value} * value;
  EXPECT_NEAR(engine.square_sum(1, sums.data()), want, 1e-12 * want);
}

/// Loss of the whole reference model, summed over tokens.
double reference_model(const LlamaCase& c, const Doubles& table,
                       const std::vector<ReferenceBlock>& blocks, const Doubles& norm,
                       const std::vector<int32_t>& tokens, const std::vector<int32_t>& targets) {
  Doubles x = reference_embed(c.sizes, table, tokens);
  for (const ReferenceBlock& block : blocks) x = reference_block(c.sizes, block, x, c.length);
  double sum = 0;
  for (const double loss : reference_losses(c.sizes, norm, table, x, targets)) sum += loss;
  return sum;
}

TEST(Llama, WholeTiedModelAgreesWithFiniteDifferences) {
  const LlamaCase& c = kTied;
  const LlamaUnderTest engine(c, DType::f32, 0xff, 2);
  const Llama& llama = engine.llama;
  const auto& layers = engine.model.layers;
  std::vector<std::vector<float>> weights, sums, x;
  for (size_t i = 0; i < layers.size(); ++i) {
    weights.push_back(layer_weights(layers[i], 30 + i));
    sums.push_back(nans(layers[i].padded));
    x.push_back(nans(c.tokens() * c.sizes.hidden));
  }
  const std::vector<int32_t> tokens = random_tokens(40, c.tokens(), c.sizes.vocabulary);
  const std::vector<int32_t> targets = random_tokens(41, c.tokens(), c.sizes.vocabulary);
  llama.embed(weights[0].data(), tokens.data(), x[0].data());
  for (uint32_t i = 1; i <= 2; ++i) {
    llama.block(i, weights[i].data(), nullptr, x[i - 1].data(), x[i].data());
  }
  std::vector<float> gradient = nans(x[0].size());
  const double loss = llama.loss({.weights = weights[3].data(),
                                  .embedding = weights[0].data(),
                                  .sums = sums[3].data(),
                                  .embedding_sums = sums[0].data(),
                                  .first = true},
                                 x[2].data(), targets.data(), 1.0f, gradient.data());
  for (uint32_t i = 2; i >= 1; --i) {
    llama.block_backward(i, weights[i].data(), nullptr, x[i - 1].data(), gradient.data(),
                         sums[i].data(), true);
  }
  llama.embed_backward(tokens.data(), gradient.data(), sums[0].data(), false);

  Doubles table = tensor_of(layers[0], 0, weights[0]);
  const std::vector<ReferenceBlock> blocks = {reference_weights(layers[1], weights[1]),
                                              reference_weights(layers[2], weights[2])};
  const Doubles norm = tensor_of(layers[3], kFinalNorm, weights[3]);
  const auto f = [&] { return reference_model(c, table, blocks, norm, tokens, targets); };
  EXPECT_NEAR(loss, f(), 1e-6 * loss);
  double scale = 0;
  for (size_t i = 0; i < table.size(); ++i) scale = std::max(scale, std::abs(double{sums[0][i]}));
  for (size_t sample = 0; sample < 60; ++sample) {
    const size_t i = random_below(42, sample, table.size());
    const double kept = table[i], step = 3e-5;
    table[i] = kept + step;
    const double above = f();
    table[i] = kept - step;
    const double below = f();
    table[i] = kept;
    // float32's roundoff through two blocks; see gradient_test.cpp.
    ASSERT_NEAR(sums[0][i], (above - below) / (2 * step), 2e-5 * scale) << i;
  }
}

TEST(Llama, EmbeddingAgreesWithReferenceAndItsGradientAddsRepeatedTokens) {
  const LlamaUnderTest engine(kUntied);
  const Weights w(engine.model);
  std::vector<int32_t> tokens = random_tokens(50, kUntied.tokens(), kSizes.vocabulary);
  tokens[3] = tokens[40] = tokens[41] = 52;  // the last row of the table, several times
  std::vector<float> y = nans(tokens.size() * kSizes.hidden);
  engine.llama.embed(w.table.data(), tokens.data(), y.data());
  const Doubles table = tensor_of(engine.model.layers[0], 0, w.table);
  EXPECT_EQ(doubles_of(y), reference_embed(kSizes, table, tokens));

  const std::vector<float> dy = normals(51, y.size());
  std::vector<float> sums = nans(engine.model.layers[0].padded);
  engine.llama.embed_backward(tokens.data(), dy.data(), sums.data(), true);
  // sum(dy * embed(table)) is linear in the table: its derivative is the sum over the token's rows.
  for (size_t i = 0; i < table.size(); ++i) {
    double want = 0;
    for (size_t r = 0; r < tokens.size(); ++r) {
      if (static_cast<size_t>(tokens[r]) == i / kSizes.hidden) {
        want += dy[r * kSizes.hidden + i % kSizes.hidden];
      }
    }
    ASSERT_NEAR(sums[i], want, 1e-6 * (1 + std::abs(want))) << i;
  }
}

}  // namespace
}  // namespace overspill
