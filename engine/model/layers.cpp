// Tensor names and offsets of the Llama family.
#include "engine/model/layers.h"

#include <algorithm>

#include "engine/base/error.h"
#include "engine/base/units.h"

namespace overspill {
namespace {

void add(LayerShape& layer, std::string name, std::vector<uint64_t> shape) {
  uint64_t elements = 1;
  for (const uint64_t extent : shape) elements *= extent;
  const bool decay = shape.size() >= 2;
  layer.tensors.push_back({std::move(name), std::move(shape),
                           round_up(layer.padded, kTensorAlignment), elements, decay, true, 0});
  layer.parameters += elements;
  layer.padded = layer.tensors.back().offset + elements;
}

LayerShape finish(LayerShape layer) {
  layer.padded = round_up(layer.padded, kParameterAlignment);
  return layer;
}

LayerShape block_layer(const ModelConfig& c, uint32_t block) {
  const std::string prefix = "model.layers." + std::to_string(block) + ".";
  const uint64_t d = c.hidden_size, f = c.intermediate_size;
  const uint64_t q = uint64_t{c.num_attention_heads} * c.head_dim;
  const uint64_t kv = uint64_t{c.num_key_value_heads} * c.head_dim;
  LayerShape layer{.kind = LayerKind::block, .tensors = {}};
  add(layer, prefix + "input_layernorm.weight", {d});
  add(layer, prefix + "self_attn.q_proj.weight", {q, d});
  add(layer, prefix + "self_attn.k_proj.weight", {kv, d});
  add(layer, prefix + "self_attn.v_proj.weight", {kv, d});
  add(layer, prefix + "self_attn.o_proj.weight", {d, q});
  add(layer, prefix + "post_attention_layernorm.weight", {d});
  add(layer, prefix + "mlp.gate_proj.weight", {f, d});
  add(layer, prefix + "mlp.up_proj.weight", {f, d});
  add(layer, prefix + "mlp.down_proj.weight", {d, f});
  return finish(std::move(layer));
}

}  // namespace

uint64_t LayerShape::trainable_parameters() const {
  uint64_t total = 0;
  for (const LayerTensor& tensor : tensors) total += tensor.trainable ? tensor.elements : 0;
  return total;
}

std::vector<LayerShape::Range> LayerShape::untrained() const {
  std::vector<Range> ranges;
  uint64_t end = 0;
  const auto add_gap = [&](uint64_t to) {
    if (to > end) ranges.push_back({end, to});
  };
  for (const LayerTensor& tensor : tensors) {
    if (!tensor.trainable) continue;
    add_gap(tensor.offset);
    end = tensor.offset + tensor.elements;
  }
  add_gap(padded);
  return ranges;
}

uint32_t ModelShape::lowest_trainable() const {
  const auto found = std::ranges::find_if(layers, &LayerShape::trainable);
  CHECK(found != layers.end());
  return static_cast<uint32_t>(found - layers.begin());
}

uint32_t ModelShape::highest_trainable() const {
  uint32_t layer = head();
  while (layer > 0 && !layers[layer].trainable()) --layer;
  return layer;
}

uint64_t ModelShape::parameters() const {
  uint64_t total = 0;
  for (const LayerShape& layer : layers) total += layer.parameters;
  return total;
}

ModelShape llama_layers(const ModelConfig& c) {
  ModelShape model{.config = c, .layers = {}};
  LayerShape embedding{.kind = LayerKind::embedding, .tensors = {}};
  add(embedding, "model.embed_tokens.weight", {c.vocab_size, c.hidden_size});
  model.layers.push_back(finish(std::move(embedding)));
  for (uint32_t i = 0; i < c.num_hidden_layers; ++i) model.layers.push_back(block_layer(c, i));
  LayerShape head{.kind = LayerKind::head, .tensors = {}};
  add(head, "model.norm.weight", {c.hidden_size});
  if (!c.tie_word_embeddings) add(head, "lm_head.weight", {c.vocab_size, c.hidden_size});
  model.layers.push_back(finish(std::move(head)));
  return model;
}

uint64_t forward_flops(const ModelShape& model, uint32_t layer, uint64_t tokens,
                       uint64_t sequence_len) {
  const ModelConfig& c = model.config;
  const LayerShape& shape = model.layers[layer];
  if (shape.kind == LayerKind::embedding) return 0;
  if (shape.kind == LayerKind::head) return 2 * tokens * c.vocab_size * c.hidden_size;
  const uint64_t attention = 2 * tokens * sequence_len * c.num_attention_heads * c.head_dim;
  return 2 * tokens * shape.parameters + attention;
}

uint64_t backward_flops(const ModelShape& model, uint32_t layer, uint64_t tokens,
                        uint64_t sequence_len) {
  const LayerShape& shape = model.layers[layer];
  if (shape.kind == LayerKind::embedding) return 0;
  uint64_t frozen = shape.parameters - shape.trainable_parameters();
  if (shape.kind == LayerKind::head) {  // its forward counts the projection only
    const bool tied = model.config.tie_word_embeddings;
    const LayerTensor& projection = tied ? model.layers[0].tensors[0] : shape.tensors[kOutput];
    frozen = projection.trainable ? 0 : projection.elements;
  }
  return 3 * forward_flops(model, layer, tokens, sequence_len) - 2 * tokens * frozen;
}

}  // namespace overspill
