// Freezing tensors changes no other bit: gradients of the input and of the tensors that still train
// are those without freezing, and what is frozen has a gradient of zero that no norm counts.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "tests/unit/engine/model/llama_under_test.h"

namespace overspill {
namespace {

using namespace test;

const ReferenceSizes kSizes = {
    .hidden = 40, .ffn = 52, .heads = 6, .kv_heads = 2, .head_dim = 8, .vocabulary = 53};
const LlamaCase kUntied{"Untied", kSizes, false, 2, 70};
const LlamaCase kTied{"Tied", kSizes, true, 2, 70};

ModelShape frozen_shape(const LlamaCase& c, uint32_t layer, uint32_t mask) {
  ModelShape model = shape_of(c);
  for (size_t t = 0; t < model.layers[layer].tensors.size(); ++t) {
    model.layers[layer].tensors[t].trainable = (mask >> t & 1) == 0;
  }
  return model;
}

bool same_bits(const float* a, const float* b, size_t size) {
  return std::memcmp(a, b, size * sizeof(float)) == 0;
}

/// `got` has the reference's bits for trainable tensors and zero everywhere else.
void expect_sums(const LayerShape& shape, const std::vector<float>& got,
                 const std::vector<float>& want) {
  std::vector<bool> trained(shape.padded, false);
  for (const LayerTensor& tensor : shape.tensors) {
    if (!tensor.trainable) continue;
    EXPECT_TRUE(same_bits(&got[tensor.offset], &want[tensor.offset], tensor.elements))
        << tensor.name;
    std::fill_n(trained.begin() + static_cast<ptrdiff_t>(tensor.offset), tensor.elements, true);
  }
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_TRUE(trained[i] || got[i] == 0.0f) << i;
  }
}

struct BlockRun {
  std::vector<float> dx, sums;
};

/// Two micro-batches, so that sums are started and added to.
BlockRun run_block(const LlamaUnderTest& on) {
  const LayerShape& shape = on.model.layers[1];
  const std::vector<float> weights = layer_weights(shape, 1);
  BlockRun run{{}, nans(shape.padded)};
  for (const bool first : {true, false}) {
    const std::vector<float> x = normals(2 + first, kUntied.tokens() * kSizes.hidden);
    run.dx = normals(4 + first, x.size());
    on.llama.block_backward(1, weights.data(), nullptr, x.data(), run.dx.data(),
                            shape.trainable() ? run.sums.data() : nullptr, first);
  }
  return run;
}

TEST(FrozenGradient, BlocksKeepTheOtherBits) {
  const BlockRun want = run_block(LlamaUnderTest(kUntied));
  constexpr uint32_t all = (1u << kBlockTensors) - 1;
  for (const uint32_t mask : {1u << kInputNorm, 1u << kPostNorm, 1u << kQuery | 1u << kDown,
                              1u << kGate | 1u << kUp | 1u << kInputNorm, all & ~(1u << kValue),
                              all & ~(1u << kPostNorm), all}) {
    SCOPED_TRACE(mask);
    const LlamaUnderTest engine(frozen_shape(kUntied, 1, mask), kUntied);
    const BlockRun got = run_block(engine);
    EXPECT_TRUE(same_bits(got.dx.data(), want.dx.data(), want.dx.size()));
    if (mask == all) {
      EXPECT_TRUE(std::isnan(got.sums[0])) << "a frozen layer has no sums";
      continue;
    }
    expect_sums(engine.model.layers[1], got.sums, want.sums);
    double squares = 0;
    for (const LayerTensor& tensor : engine.model.layers[1].tensors) {
      if (!tensor.trainable) continue;
      squares += host_kernels().sum_of_squares(&want.sums[tensor.offset], tensor.elements);
    }
    EXPECT_EQ(engine.square_sum(1, got.sums.data()), squares);
  }
}

struct HeadRun {
  std::vector<float> dx, sums, embedding_sums;
  double loss = 0;
};

HeadRun run_head(const LlamaCase& c, const LlamaUnderTest& on) {
  const std::vector<float> weights = layer_weights(on.head(), 6);
  const std::vector<float> table = layer_weights(on.model.layers[0], 7);
  HeadRun run{nans(c.tokens() * c.sizes.hidden), nans(on.head().padded),
              nans(on.model.layers[0].padded)};
  for (const bool first : {true, false}) {
    const std::vector<float> x = normals(8 + first, run.dx.size());
    const std::vector<int32_t> targets = random_tokens(9, c.tokens(), c.sizes.vocabulary);
    const bool trains_table = c.tied && on.model.layers[0].trainable();
    const Llama::Head head{.weights = weights.data(),
                           .embedding = c.tied ? table.data() : nullptr,
                           .sums = on.head().trainable() ? run.sums.data() : nullptr,
                           .embedding_sums = trains_table ? run.embedding_sums.data() : nullptr,
                           .first = first};
    run.loss += on.llama.loss(head, x.data(), targets.data(), 0.25f, run.dx.data());
  }
  return run;
}

TEST(FrozenGradient, HeadsKeepTheOtherBits) {
  for (const LlamaCase& c : {kUntied, kTied}) {
    const HeadRun want = run_head(c, LlamaUnderTest(c));
    const uint32_t head = shape_of(c).head();
    for (const uint32_t mask : {1u, 2u, 3u}) {
      for (const bool table_frozen : {false, true}) {
        SCOPED_TRACE(fmt::format("{} {} {}", c.name, mask, table_frozen));
        ModelShape shape = frozen_shape(c, head, mask);
        shape.layers[0].tensors[0].trainable = !table_frozen;
        const LlamaUnderTest engine(shape, c);
        const HeadRun got = run_head(c, engine);
        EXPECT_EQ(got.loss, want.loss);
        EXPECT_TRUE(same_bits(got.dx.data(), want.dx.data(), want.dx.size()));
        if (engine.head().trainable()) {
          expect_sums(engine.head(), got.sums, want.sums);
        } else {
          EXPECT_TRUE(std::isnan(got.sums[0]));
        }
        if (c.tied && !table_frozen) {
          expect_sums(engine.model.layers[0], got.embedding_sums, want.embedding_sums);
        } else {
          EXPECT_TRUE(std::isnan(got.embedding_sums[0]));
        }
      }
    }
  }
}

TEST(FrozenGradient, FlopsAreWithoutTheSkippedProducts) {
  ModelShape model = shape_of(kUntied);
  const uint64_t tokens = 140, block = forward_flops(model, 1, tokens, 70);
  const uint64_t head = forward_flops(model, 2, tokens, 70);
  EXPECT_EQ(backward_flops(model, 1, tokens, 70), 3 * block);
  EXPECT_EQ(backward_flops(model, 2, tokens, 70), 3 * head);
  LayerTensor& down = model.layers[1].tensors[kDown];
  down.trainable = false;
  EXPECT_EQ(backward_flops(model, 1, tokens, 70), 3 * block - 2 * tokens * down.elements);
  model.layers[2].tensors[kOutput].trainable = false;
  EXPECT_EQ(backward_flops(model, 2, tokens, 70), 2 * head);
}

}  // namespace
}  // namespace overspill
