// Parses and checks config.json for LlamaForCausalLM, and computes rotary frequencies.
// Pure functions apart from reading the file. Values that no computation here supports are refused
// rather than ignored, because a silently wrong model trains without complaint.
#include "engine/model/model_config.h"

#include <array>
#include <cmath>
#include <numbers>
#include <string_view>
#include <utility>

#include "engine/base/error.h"
#include "engine/base/fd.h"

namespace overspill {
namespace {

using nlohmann::json;

constexpr uint64_t kCountLimit = uint64_t{1} << 31;
constexpr uint64_t kParameterLimit = uint64_t{1} << 48;
constexpr uint64_t kDefaultPositions = 2048;

/// A scalar as written, or the kind of a structure: dump() recurses, and files nest at will.
std::string describe(const json& value) {
  if (value.is_structured()) return value.is_array() ? "an array" : "an object";
  std::string text = value.dump(-1, ' ', false, json::error_handler_t::replace);
  if (text.size() > 60) text = text.substr(0, 57) + "...";
  return text;
}

/// Typed access to one JSON object; null counts as absent, as transformers treats it.
class ConfigObject {
 public:
  ConfigObject(const json& object, std::string where, std::string prefix = "")
      : object_(object), where_(std::move(where)), prefix_(std::move(prefix)) {
    if (!object_.is_object()) {
      fail(ErrorCode::invalid_file, "{}: {}{}, expected an object; fix the file", where_,
           prefix_.empty() ? "the file holds " : prefix_ + " is ", describe(object_));
    }
  }

  const json* find(const char* key) const {
    const auto found = object_.find(key);
    return found == object_.end() || found->is_null() ? nullptr : &*found;
  }

  const json& require(const char* key) const {
    const json* value = find(key);
    if (value == nullptr) {
      fail(ErrorCode::invalid_file, "{}: {} is missing; copy config.json from the model again",
           where_, name(key));
    }
    return *value;
  }

  uint32_t count(const char* key) const { return check_count(key, require(key)); }
  uint32_t count(const char* key, uint64_t fallback) const {
    const json* value = find(key);
    return check_count(key, value == nullptr ? json(fallback) : *value);
  }

  double real(const char* key) const { return check_real(key, require(key)); }
  double real(const char* key, double fallback) const {
    const json* value = find(key);
    return value == nullptr ? fallback : check_real(key, *value);
  }

  bool flag(const char* key, bool fallback) const {
    const json* value = find(key);
    if (value == nullptr) return fallback;
    if (!value->is_boolean()) refuse(key, *value, "true or false");
    return value->get<bool>();
  }

  std::string text(const char* key, const char* fallback) const {
    const json* value = find(key);
    if (value == nullptr) return fallback;
    if (!value->is_string()) refuse(key, *value, "a string");
    return value->get<std::string>();
  }

  [[noreturn]] void refuse(const char* key, const json& found, std::string_view expected) const {
    fail(ErrorCode::invalid_file, "{}: {} is {}, expected {}", where_, name(key), describe(found),
         expected);
  }

  const json& object() const { return object_; }
  const std::string& where() const { return where_; }

 private:
  std::string name(const char* key) const { return prefix_.empty() ? key : prefix_ + "." + key; }

  uint32_t check_count(const char* key, const json& value) const {
    const bool positive = value.is_number_integer() && value > 0;
    if (!positive || value >= kCountLimit) {
      refuse(key, value, "a whole number from 1 to 2147483647");
    }
    return value.get<uint32_t>();
  }

  double check_real(const char* key, const json& value) const {
    const bool positive = value.is_number() && value.get<double>() > 0;
    if (!positive || !std::isfinite(value.get<double>())) refuse(key, value, "a positive number");
    return value.get<double>();
  }

  const json& object_;
  std::string where_;
  std::string prefix_;
};

void check_architecture(const ConfigObject& config) {
  const json* architectures = config.find("architectures");
  const bool named = architectures != nullptr && !architectures->empty();
  if (named) {
    const json& first = architectures->is_array() ? architectures->front() : *architectures;
    if (!first.is_string() || first.get<std::string>() != "LlamaForCausalLM") {
      config.refuse("architectures", first,
                    "\"LlamaForCausalLM\"; no other architecture is supported");
    }
  } else if (config.text("model_type", "") != "llama") {
    fail(ErrorCode::invalid_file,
         "{}: architectures is missing and model_type is not \"llama\"; only LlamaForCausalLM is "
         "supported, and such a file says \"architectures\": [\"LlamaForCausalLM\"]",
         config.where());
  }
}

/// One message for every missing key, so that a wrong file is fixed in one go.
void check_required_keys(const ConfigObject& config) {
  constexpr std::array kRequired = {"hidden_size", "intermediate_size", "num_hidden_layers",
                                    "num_attention_heads", "vocab_size"};
  std::string missing;
  for (const char* key : kRequired) {
    if (config.find(key) == nullptr) missing += (missing.empty() ? "" : ", ") + std::string(key);
  }
  if (missing.empty()) return;
  fail(ErrorCode::invalid_file, "{}: missing: {}; copy config.json from the model again",
       config.where(), missing);
}

void check_unsupported_options(const ConfigObject& config) {
  const std::string activation = config.text("hidden_act", "silu");
  if (activation != "silu") config.refuse("hidden_act", activation, "\"silu\"");
  for (const char* key : {"attention_bias", "mlp_bias"}) {
    if (config.flag(key, false)) {
      config.refuse(key, true, "false; linear layers with biases are not supported");
    }
  }
  if (const json* quantization = config.find("quantization_config")) {
    config.refuse("quantization_config", *quantization,
                  "none; use the model's unquantized weights (bfloat16, float16 or float32)");
  }
  if (config.real("partial_rotary_factor", 1.0) != 1.0) {
    config.refuse("partial_rotary_factor", *config.find("partial_rotary_factor"), "1.0");
  }
}

std::optional<Llama3RopeScaling> parse_scaling(const ConfigObject& rope, bool type_required) {
  const char* type_key = rope.find("rope_type") != nullptr ? "rope_type" : "type";
  if (type_required && rope.find(type_key) == nullptr) rope.require("rope_type");
  const std::string type = rope.text(type_key, "default");
  if (rope.real("partial_rotary_factor", 1.0) != 1.0) {
    rope.refuse("partial_rotary_factor", *rope.find("partial_rotary_factor"), "1.0");
  }
  if (type == "default") return std::nullopt;
  if (type != "llama3") {
    rope.refuse(type_key, type, "\"default\" or \"llama3\"; other rope types are not supported");
  }
  Llama3RopeScaling scaling;
  scaling.factor = rope.real("factor");
  scaling.low_freq_factor = rope.real("low_freq_factor");
  scaling.high_freq_factor = rope.real("high_freq_factor");
  scaling.original_max_position_embeddings = rope.count("original_max_position_embeddings");
  if (scaling.factor < 1.0) rope.refuse("factor", *rope.find("factor"), "at least 1");
  if (scaling.high_freq_factor <= scaling.low_freq_factor) {
    rope.refuse("high_freq_factor", *rope.find("high_freq_factor"),
                fmt::format("more than low_freq_factor, {}", scaling.low_freq_factor));
  }
  return scaling;
}

bool same_scaling(const std::optional<Llama3RopeScaling>& a,
                  const std::optional<Llama3RopeScaling>& b) {
  if (!a || !b) return a.has_value() == b.has_value();
  return a->factor == b->factor && a->low_freq_factor == b->low_freq_factor &&
         a->high_freq_factor == b->high_freq_factor &&
         a->original_max_position_embeddings == b->original_max_position_embeddings;
}

/// Reads both dialects. A file may hold both, as a converted one does, when they agree.
void parse_rope(const ConfigObject& config, ModelConfig& model) {
  std::optional<double> theta;
  bool have_scaling = false;
  if (config.find("rope_theta") != nullptr) theta = config.real("rope_theta");
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    const json* object = config.find(key);
    if (object == nullptr) continue;
    const ConfigObject rope(*object, config.where(), key);
    for (const auto& [name, value] : object->items()) {
      // Models of mixed attention nest one object per layer type here.
      if (value.is_structured()) rope.refuse(name.c_str(), value, "a number or a string");
    }
    const bool type_required = std::string_view(key) == "rope_scaling";
    const auto scaling = parse_scaling(rope, type_required);
    if (have_scaling && !same_scaling(scaling, model.rope_scaling)) {
      fail(ErrorCode::invalid_file,
           "{}: rope_scaling and rope_parameters disagree; remove the one that is wrong",
           config.where());
    }
    have_scaling = true;
    model.rope_scaling = scaling;
    if (rope.find("rope_theta") == nullptr) continue;
    const double own = rope.real("rope_theta");
    if (theta && *theta != own) {
      fail(ErrorCode::invalid_file,
           "{}: {}.rope_theta is {}, but rope_theta is {} elsewhere in the file; remove the one "
           "that is wrong",
           config.where(), key, own, *theta);
    }
    theta = own;
  }
  model.rope_theta = theta.value_or(10000.0);
}

void parse_heads(const ConfigObject& config, ModelConfig& model) {
  model.num_attention_heads = config.count("num_attention_heads");
  model.num_key_value_heads = config.count("num_key_value_heads", model.num_attention_heads);
  if (model.num_attention_heads % model.num_key_value_heads != 0) {
    config.refuse("num_key_value_heads", model.num_key_value_heads,
                  fmt::format("a divisor of num_attention_heads, {}", model.num_attention_heads));
  }
  const bool derived = config.find("head_dim") == nullptr;
  if (derived && model.hidden_size % model.num_attention_heads != 0) {
    fail(ErrorCode::invalid_file,
         "{}: head_dim is missing, and hidden_size {} is no multiple of num_attention_heads {}; "
         "add head_dim",
         config.where(), model.hidden_size, model.num_attention_heads);
  }
  model.head_dim =
      derived ? model.hidden_size / model.num_attention_heads : config.count("head_dim");
  if (model.head_dim % 2 != 0) {
    config.refuse("head_dim", model.head_dim, "an even number: rotary embedding pairs dimensions");
  }
  if (uint64_t{model.head_dim} * model.num_attention_heads >= kCountLimit) {
    config.refuse(
        "head_dim", model.head_dim,
        fmt::format("at most 2147483647 over num_attention_heads, {}", model.num_attention_heads));
  }
}

/// 128 bits: the product of three values below 2^31 needs 93.
unsigned __int128 wide_parameter_count(const ModelConfig& model) {
  using Wide = unsigned __int128;
  const Wide hidden = model.hidden_size, head = model.head_dim;
  const Wide query = hidden * head * model.num_attention_heads;
  const Wide key = hidden * head * model.num_key_value_heads;
  const Wide mlp = hidden * model.intermediate_size * 3;
  const Wide layer = 2 * query + 2 * key + mlp + 2 * hidden;
  const Wide embedding = hidden * model.vocab_size;
  return layer * model.num_hidden_layers + hidden + embedding * (model.tie_word_embeddings ? 1 : 2);
}

}  // namespace

uint64_t ModelConfig::parameter_count() const {
  return static_cast<uint64_t>(wide_parameter_count(*this));
}

ModelConfig parse_model_config(const json& source, const std::string& where) {
  const ConfigObject config(source, where);
  check_architecture(config);
  check_required_keys(config);
  check_unsupported_options(config);
  ModelConfig model;
  model.hidden_size = config.count("hidden_size");
  model.intermediate_size = config.count("intermediate_size");
  model.num_hidden_layers = config.count("num_hidden_layers");
  model.vocab_size = config.count("vocab_size");
  model.max_position_embeddings = config.count("max_position_embeddings", kDefaultPositions);
  model.rms_norm_eps = config.real("rms_norm_eps", model.rms_norm_eps);
  model.initializer_range = config.real("initializer_range", model.initializer_range);
  model.tie_word_embeddings = config.flag("tie_word_embeddings", false);
  parse_heads(config, model);
  parse_rope(config, model);
  if (wide_parameter_count(model) >= kParameterLimit) {
    fail(ErrorCode::invalid_file,
         "{}: its sizes give a model of 2^48 or more parameters; check hidden_size, "
         "intermediate_size, num_hidden_layers and vocab_size",
         where);
  }
  model.source = source;
  return model;
}

ModelConfig load_model_config(const std::filesystem::path& path) {
  std::error_code ignored;
  const bool directory = std::filesystem::is_directory(path, ignored);
  const std::filesystem::path file = directory ? path / "config.json" : path;
  if (!std::filesystem::exists(file, ignored)) {
    fail(ErrorCode::not_found,
         "{}: no such file; a Hugging Face model directory holds config.json, model.safetensors "
         "(or model.safetensors.index.json and its shards) and the tokenizer's files",
         file.string());
  }
  json source;
  try {
    source = json::parse(read_text_file(file));
  } catch (const json::exception& error) {
    fail(ErrorCode::invalid_file, "{}: not JSON: {}; copy config.json from the model again",
         file.string(), error.what());
  }
  return parse_model_config(source, file.string());
}

std::vector<double> rope_inverse_frequencies(const ModelConfig& config) {
  std::vector<double> frequencies(config.head_dim / 2);
  for (size_t i = 0; i < frequencies.size(); ++i) {
    const double exponent = 2.0 * static_cast<double>(i) / config.head_dim;
    frequencies[i] = 1.0 / std::pow(config.rope_theta, exponent);
  }
  if (!config.rope_scaling) return frequencies;
  // Wavelengths longer than the original context divided by low_freq_factor are stretched whole,
  // those shorter than it divided by high_freq_factor are kept, and between them is a linear blend.
  const Llama3RopeScaling& scaling = *config.rope_scaling;
  for (double& frequency : frequencies) {
    const double turns =
        scaling.original_max_position_embeddings * frequency / (2.0 * std::numbers::pi);
    if (turns > scaling.high_freq_factor) continue;
    if (turns < scaling.low_freq_factor) {
      frequency /= scaling.factor;
      continue;
    }
    const double kept =
        (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor);
    frequency = (1.0 - kept) * frequency / scaling.factor + kept * frequency;
  }
  return frequencies;
}

void rotary_table(const ModelConfig& config, uint64_t positions, float* table) {
  const std::vector<double> frequency = rope_inverse_frequencies(config);
  const uint64_t half = config.head_dim / 2;
  for (uint64_t t = 0; t < positions; ++t) {
    for (uint64_t j = 0; j < half; ++j) {
      const double angle = static_cast<double>(t) * frequency[j];
      table[t * 2 * half + j] = static_cast<float>(std::cos(angle));
      table[t * 2 * half + half + j] = static_cast<float>(std::sin(angle));
    }
  }
}

}  // namespace overspill
