// Hugging Face's config.json for LlamaForCausalLM, both dialects (`rope_theta` + `rope_scaling`,
// and `rope_parameters`). Immutable after loading.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

namespace overspill {

/// Llama 3's frequency scaling (Meta's llama-models reference, as in transformers' "llama3" type).
struct Llama3RopeScaling {
  double factor = 8.0;
  double low_freq_factor = 1.0;
  double high_freq_factor = 4.0;
  double original_max_position_embeddings = 8192;
};

struct ModelConfig {
  uint32_t hidden_size = 0;
  uint32_t intermediate_size = 0;
  uint32_t num_hidden_layers = 0;
  uint32_t num_attention_heads = 0;
  uint32_t num_key_value_heads = 0;
  uint32_t head_dim = 0;
  uint32_t vocab_size = 0;
  uint32_t max_position_embeddings = 0;
  double rms_norm_eps = 1e-6;
  double rope_theta = 10000.0;
  std::optional<Llama3RopeScaling> rope_scaling;
  double initializer_range = 0.02;
  bool tie_word_embeddings = false;
  nlohmann::json source;  ///< the whole file, so that an export keeps keys we do not use

  uint64_t parameter_count() const;
};

/// Reads `path` (a config.json, or a directory that holds one). Throws Error(invalid_file) naming
/// file and key for a missing, wrong-typed, out-of-range or unsupported value (another architecture
/// or activation, attention_bias, mlp_bias, an unknown rope type).
ModelConfig load_model_config(const std::filesystem::path& path);
/// The same from parsed JSON; `where` names the origin in messages.
ModelConfig parse_model_config(const nlohmann::json& json, const std::string& where);

/// Rotary inverse frequencies, head_dim/2 values, scaled as the config says (float64).
std::vector<double> rope_inverse_frequencies(const ModelConfig& config);
/// table[position]: head_dim/2 cosines of the position's angles, then as many sines.
void rotary_table(const ModelConfig& config, uint64_t positions, float* table);

}  // namespace overspill
