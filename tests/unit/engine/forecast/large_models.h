// Shapes of published models, for plans alone.
#pragma once

#include "engine/model/layers.h"
#include "engine/model/model_config.h"

namespace overspill::test {

inline ModelShape large_model(uint32_t blocks, uint32_t hidden, uint32_t intermediate,
                              uint32_t heads) {
  ModelConfig c;
  c.hidden_size = hidden;
  c.intermediate_size = intermediate;
  c.num_hidden_layers = blocks;
  c.num_attention_heads = heads;
  c.num_key_value_heads = 8;
  c.head_dim = 128;
  c.vocab_size = 128256;
  c.max_position_embeddings = 4096;
  return llama_layers(c);
}

}  // namespace overspill::test
