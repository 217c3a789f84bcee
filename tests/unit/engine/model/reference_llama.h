// An independent reference of the Llama family's layers: float64, naive loops over whole matrices,
// nothing shared with the engine. Written from the model's published definition.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace overspill::test {

using Doubles = std::vector<double>;

struct ReferenceSizes {
  size_t hidden, ffn, heads, kv_heads, head_dim, vocabulary;
  double eps = 1e-5;
  double rope_theta = 10000.0;
  bool llama3_scaling = false;
  double factor = 8, low_freq_factor = 1, high_freq_factor = 4, original_context = 8192;
};

/// Row-major [out, in] matrices, and norms of `hidden` values.
struct ReferenceBlock {
  Doubles input_norm, query, key, value, attention_out, post_norm, gate, up, down;
};

/// Rotary inverse frequencies of pairs (j, j + head_dim / 2).
Doubles reference_frequencies(const ReferenceSizes& sizes);

/// [tokens, hidden].
Doubles reference_embed(const ReferenceSizes& sizes, const Doubles& table,
                        const std::vector<int32_t>& tokens);

/// x and the result: [sequences * length, hidden].
Doubles reference_block(const ReferenceSizes& sizes, const ReferenceBlock& weights,
                        const Doubles& x, size_t length);

/// Logits of one row of `hidden` values.
Doubles reference_logits(const ReferenceSizes& sizes, const Doubles& norm,
                         const Doubles& projection, const double* row);

/// -log softmax(logits)[target] of each row.
Doubles reference_losses(const ReferenceSizes& sizes, const Doubles& norm,
                         const Doubles& projection, const Doubles& x,
                         const std::vector<int32_t>& targets);

}  // namespace overspill::test
