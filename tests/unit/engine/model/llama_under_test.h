// The engine's model over one micro-batch in hostile memory, for tests: scratch, padding between
// tensors and outputs start as NaN, so that a value that is read before it is written shows.
#pragma once

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "engine/base/random.h"
#include "engine/model/host_state_math.h"
#include "engine/model/llama.h"
#include "tests/unit/engine/model/reference_llama.h"

namespace overspill::test {

struct LlamaCase {
  std::string name;
  ReferenceSizes sizes;
  bool tied;
  size_t sequences, length;

  size_t tokens() const { return sequences * length; }
};

inline ModelShape shape_of(const LlamaCase& c, uint32_t blocks = 1) {
  ModelConfig config;
  config.hidden_size = static_cast<uint32_t>(c.sizes.hidden);
  config.intermediate_size = static_cast<uint32_t>(c.sizes.ffn);
  config.num_hidden_layers = blocks;
  config.num_attention_heads = static_cast<uint32_t>(c.sizes.heads);
  config.num_key_value_heads = static_cast<uint32_t>(c.sizes.kv_heads);
  config.head_dim = static_cast<uint32_t>(c.sizes.head_dim);
  config.vocab_size = static_cast<uint32_t>(c.sizes.vocabulary);
  config.max_position_embeddings = static_cast<uint32_t>(c.length);
  config.rms_norm_eps = c.sizes.eps;
  config.rope_theta = c.sizes.rope_theta;
  config.tie_word_embeddings = c.tied;
  if (c.sizes.llama3_scaling) {
    config.rope_scaling = {c.sizes.factor, c.sizes.low_freq_factor, c.sizes.high_freq_factor,
                           c.sizes.original_context};
  }
  return llama_layers(config);
}

struct LlamaUnderTest {
  /// Every byte of the scratch is `fill` before the engine gets it; 0xff makes NaN.
  explicit LlamaUnderTest(const LlamaCase& c, DType type = DType::f32, int fill = 0xff,
                          uint32_t blocks = 1)
      : LlamaUnderTest(shape_of(c, blocks), c, type, fill) {}
  LlamaUnderTest(const ModelShape& shape, const LlamaCase& c, DType type = DType::f32,
                 int fill = 0xff)
      : model(shape), llama(model, type, {c.sequences, c.length}, host_kernels()) {
    scratch.reset(std::aligned_alloc(4096, llama.scratch_bytes()));
    std::memset(scratch.get(), fill, llama.scratch_bytes());
    llama.set_scratch(static_cast<std::byte*>(scratch.get()));
  }
  const LayerShape& head() const { return model.layers.back(); }
  /// Of a layer's gradient sums, as the global norm adds them up.
  double square_sum(uint32_t layer, const float* sums) const {
    double total = 0;
    HostStateMath(model, host_kernels())
        .square_sum(layer, sums, 0, model.layers[layer].padded, &total);
    return total;
  }

  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  ModelShape model;
  Llama llama;
  std::unique_ptr<void, Free> scratch;
};

inline std::vector<float> nans(size_t size) { return std::vector<float>(size, NAN); }

inline std::vector<float> normals(uint64_t key, size_t size, float scale = 1) {
  std::vector<float> values(size);
  for (size_t i = 0; i < size; ++i) values[i] = scale * random_normal(key, i);
  return values;
}

/// Flattened weights: matrices with variance 1 / inputs, norms around 1, NaN in the padding.
inline std::vector<float> layer_weights(const LayerShape& shape, uint64_t key) {
  std::vector<float> flat = nans(shape.padded);
  for (const LayerTensor& tensor : shape.tensors) {
    const bool matrix = tensor.shape.size() == 2;
    const float scale = matrix ? 1 / std::sqrt(static_cast<float>(tensor.shape[1])) : 0.2f;
    for (size_t i = 0; i < tensor.elements; ++i) {
      const float noise = scale * random_normal(key, tensor.offset + i);
      flat[tensor.offset + i] = matrix ? noise : 1 + noise;
    }
  }
  return flat;
}

inline Doubles doubles_of(const std::vector<float>& values) {
  return {values.begin(), values.end()};
}
inline Doubles tensor_of(const LayerShape& shape, size_t index, const std::vector<float>& flat) {
  const float* first = flat.data() + shape.tensors[index].offset;
  return {first, first + shape.tensors[index].elements};
}
inline ReferenceBlock reference_weights(const LayerShape& shape, const std::vector<float>& flat) {
  const auto tensor = [&](BlockTensor index) { return tensor_of(shape, index, flat); };
  return {tensor(kInputNorm), tensor(kQuery), tensor(kKey), tensor(kValue), tensor(kAttentionOut),
          tensor(kPostNorm),  tensor(kGate),  tensor(kUp),  tensor(kDown)};
}

inline std::vector<int32_t> random_tokens(uint64_t key, size_t size, size_t vocabulary) {
  std::vector<int32_t> tokens(size);
  for (size_t i = 0; i < size; ++i) {
    tokens[i] = static_cast<int32_t>(random_below(key, i, vocabulary));
  }
  return tokens;
}

}  // namespace overspill::test
