// Small model shapes and plan options shared by tests.
#pragma once

#include "engine/base/units.h"
#include "engine/plan/layout.h"

namespace overspill::test {

inline ModelShape tiny_model(bool tied, uint32_t blocks = 3) {
  ModelConfig c;
  c.hidden_size = 64;
  c.intermediate_size = 160;
  c.num_hidden_layers = blocks;
  c.num_attention_heads = 4;
  c.num_key_value_heads = 2;
  c.head_dim = 16;
  c.vocab_size = 300;
  c.max_position_embeddings = 128;
  c.tie_word_embeddings = tied;
  return llama_layers(c);
}

inline PlanOptions roomy_options() {
  PlanOptions o;
  o.micro_batches = 2;
  o.micro_batch_tokens = 32;
  o.sequence_len = 16;
  o.compute_scratch_bytes = 1 << 20;
  o.device_memory = 64 * kMiB;
  o.host_memory = 64 * kMiB;
  o.nvme_available = true;
  o.chunk_parameters = 8192;
  return o;
}

}  // namespace overspill::test
