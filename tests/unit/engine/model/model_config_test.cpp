// config.json: both dialects, every refusal's message, and rotary frequencies.
#include "engine/model/model_config.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <fstream>

#include "engine/base/error.h"

namespace overspill {
namespace {

using nlohmann::json;
namespace fs = std::filesystem;

/// TinyLlama-1.1B's sizes.
json tiny_llama() {
  return {{"architectures", {"LlamaForCausalLM"}},
          {"hidden_size", 2048},
          {"intermediate_size", 5632},
          {"num_hidden_layers", 22},
          {"num_attention_heads", 32},
          {"num_key_value_heads", 4},
          {"vocab_size", 32000},
          {"max_position_embeddings", 2048},
          {"rms_norm_eps", 1e-5},
          {"rope_theta", 10000.0},
          {"hidden_act", "silu"},
          {"tie_word_embeddings", false}};
}

json llama3_scaling() {
  return {{"rope_type", "llama3"},
          {"factor", 32.0},
          {"low_freq_factor", 1.0},
          {"high_freq_factor", 4.0},
          {"original_max_position_embeddings", 8192}};
}

/// Llama-3.2-1B's sizes.
json llama_3_2() {
  json source = tiny_llama();
  source.update({{"hidden_size", 2048},
                 {"intermediate_size", 8192},
                 {"num_hidden_layers", 16},
                 {"num_key_value_heads", 8},
                 {"head_dim", 64},
                 {"vocab_size", 128256},
                 {"rope_theta", 500000.0},
                 {"rope_scaling", llama3_scaling()},
                 {"tie_word_embeddings", true}});
  return source;
}

/// The message of the Error(invalid_file) that parsing ends in; empty when it succeeds.
std::string refusal(const json& source) {
  try {
    parse_model_config(source, "dir/config.json");
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_file);
    EXPECT_EQ(std::string(error.what()).find("dir/config.json: "), 0u) << error.what();
    return error.what();
  }
  return "";
}

std::string refusal_with(const std::string& key, const json& value) {
  json source = tiny_llama();
  source[key] = value;
  return refusal(source);
}

std::string refusal_with_scaling(const std::string& key, const json& value) {
  json source = llama_3_2();
  source["rope_scaling"][key] = value;
  return refusal(source);
}

testing::AssertionResult contains(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "\"" << text << "\" lacks \"" << part << "\"";
}

TEST(ModelConfig, ReadsOlderDialect) {
  const ModelConfig config = parse_model_config(tiny_llama(), "config.json");
  EXPECT_EQ(config.hidden_size, 2048u);
  EXPECT_EQ(config.intermediate_size, 5632u);
  EXPECT_EQ(config.num_hidden_layers, 22u);
  EXPECT_EQ(config.num_attention_heads, 32u);
  EXPECT_EQ(config.num_key_value_heads, 4u);
  EXPECT_EQ(config.head_dim, 64u);
  EXPECT_EQ(config.vocab_size, 32000u);
  EXPECT_EQ(config.max_position_embeddings, 2048u);
  EXPECT_EQ(config.rms_norm_eps, 1e-5);
  EXPECT_EQ(config.rope_theta, 10000.0);
  EXPECT_FALSE(config.rope_scaling);
  EXPECT_FALSE(config.tie_word_embeddings);
}

TEST(ModelConfig, KeepsUnusedKeysForExport) {
  json source = tiny_llama();
  source["bos_token_id"] = 7;
  EXPECT_EQ(parse_model_config(source, "config.json").source, source);
}

TEST(ModelConfig, FillsDefaultsForAbsentAndNullKeys) {
  json source = tiny_llama();
  for (const char* key : {"num_key_value_heads", "rope_theta", "rms_norm_eps", "hidden_act"}) {
    source.erase(key);
  }
  source["head_dim"] = nullptr;
  source["rope_scaling"] = nullptr;
  source["max_position_embeddings"] = nullptr;
  const ModelConfig config = parse_model_config(source, "config.json");
  EXPECT_EQ(config.num_key_value_heads, 32u);
  EXPECT_EQ(config.head_dim, 64u);
  EXPECT_EQ(config.rope_theta, 10000.0);
  EXPECT_EQ(config.rms_norm_eps, 1e-6);
  EXPECT_EQ(config.max_position_embeddings, 2048u);
  EXPECT_FALSE(config.rope_scaling);
}

TEST(ModelConfig, AllowsHeadDimIndependentOfHiddenSize) {
  json source = tiny_llama();
  source["head_dim"] = 128;
  EXPECT_EQ(parse_model_config(source, "config.json").head_dim, 128u);
  source["num_attention_heads"] = 24;  // 2048 is no multiple of 24
  EXPECT_EQ(parse_model_config(source, "config.json").num_attention_heads, 24u);
}

// Published parameter counts.
TEST(ModelConfig, CountsParameters) {
  EXPECT_EQ(parse_model_config(tiny_llama(), "").parameter_count(), 1'100'048'384u);
  EXPECT_EQ(parse_model_config(llama_3_2(), "").parameter_count(), 1'235'814'400u);
}

TEST(ModelConfig, ReadsLlama3ScalingInEitherSpelling) {
  json source = llama_3_2();
  for (const char* key : {"rope_type", "type"}) {
    source["rope_scaling"].erase("rope_type");
    source["rope_scaling"][key] = "llama3";
    const ModelConfig config = parse_model_config(source, "config.json");
    ASSERT_TRUE(config.rope_scaling) << key;
    EXPECT_EQ(config.rope_scaling->factor, 32.0);
    EXPECT_EQ(config.rope_scaling->low_freq_factor, 1.0);
    EXPECT_EQ(config.rope_scaling->high_freq_factor, 4.0);
    EXPECT_EQ(config.rope_scaling->original_max_position_embeddings, 8192.0);
  }
}

TEST(ModelConfig, ReadsRopeParametersDialect) {
  json source = llama_3_2();
  source.erase("rope_scaling");
  source.erase("rope_theta");
  source["rope_parameters"] = llama3_scaling();
  source["rope_parameters"]["rope_theta"] = 500000.0;
  const ModelConfig config = parse_model_config(source, "config.json");
  EXPECT_EQ(config.rope_theta, 500000.0);
  ASSERT_TRUE(config.rope_scaling);
  EXPECT_EQ(config.rope_scaling->factor, 32.0);
  source["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", 1e6}};
  EXPECT_EQ(parse_model_config(source, "config.json").rope_theta, 1e6);
  EXPECT_FALSE(parse_model_config(source, "config.json").rope_scaling);
}

TEST(ModelConfig, AcceptsBothDialectsOnlyWhenTheyAgree) {
  json source = llama_3_2();
  source["rope_parameters"] = llama3_scaling();
  source["rope_parameters"]["rope_theta"] = 500000.0;
  EXPECT_EQ(refusal(source), "");
  source["rope_parameters"]["factor"] = 8.0;
  EXPECT_TRUE(contains(refusal(source), "rope_scaling and rope_parameters disagree"));
  source["rope_parameters"]["factor"] = 32.0;
  source["rope_parameters"]["rope_theta"] = 10000.0;
  EXPECT_TRUE(contains(refusal(source),
                       "rope_parameters.rope_theta is 10000, but rope_theta is "
                       "500000"));
}

TEST(ModelConfig, RefusesOtherArchitectures) {
  EXPECT_TRUE(contains(refusal_with("architectures", {"MistralForCausalLM"}),
                       "architectures is \"MistralForCausalLM\", expected \"LlamaForCausalLM\""));
  json source = tiny_llama();
  source.erase("architectures");
  EXPECT_TRUE(contains(refusal(source), "architectures is missing"));
  source["model_type"] = "llama";
  EXPECT_EQ(refusal(source), "");
}

TEST(ModelConfig, NamesEveryMissingKey) {
  json source = tiny_llama();
  source.erase("hidden_size");
  source.erase("vocab_size");
  EXPECT_TRUE(contains(refusal(source), "missing: hidden_size, vocab_size;"));
}

TEST(ModelConfig, RefusesCountsOutOfRange) {
  const std::string expected = ", expected a whole number from 1 to 2147483647";
  for (const char* key :
       {"hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings"}) {
    for (const json& value : {json(0), json(-1), json(1.5), json("8"), json(uint64_t{1} << 31)}) {
      EXPECT_TRUE(
          contains(refusal_with(key, value), std::string(key) + " is " + value.dump() + expected));
    }
    EXPECT_TRUE(contains(refusal_with(key, json::array()), std::string(key) + " is an array"));
  }
}

TEST(ModelConfig, RefusesRealsThatAreNotPositive) {
  for (const char* key : {"rms_norm_eps", "rope_theta", "initializer_range"}) {
    for (const json& value : {json(0), json(-1e-6), json("1e-6"), json(true)}) {
      EXPECT_TRUE(contains(refusal_with(key, value),
                           std::string(key) + " is " + value.dump() + ", expected a positive"));
    }
  }
}

TEST(ModelConfig, RefusesUnsupportedOptions) {
  EXPECT_TRUE(contains(refusal_with("hidden_act", "gelu"), "hidden_act is \"gelu\", expected "));
  EXPECT_TRUE(contains(refusal_with("attention_bias", true), "attention_bias is true, expected f"));
  EXPECT_TRUE(contains(refusal_with("mlp_bias", true), "mlp_bias is true, expected false"));
  EXPECT_TRUE(contains(refusal_with("mlp_bias", "no"), "mlp_bias is \"no\", expected true or"));
  EXPECT_TRUE(contains(refusal_with("tie_word_embeddings", 1), "tie_word_embeddings is 1, "));
  EXPECT_TRUE(contains(refusal_with("quantization_config", json::object()),
                       "quantization_config is an object, expected none"));
  EXPECT_TRUE(contains(refusal_with("partial_rotary_factor", 0.5), "partial_rotary_factor is 0.5"));
}

TEST(ModelConfig, RefusesImpossibleHeads) {
  EXPECT_TRUE(contains(refusal_with("num_key_value_heads", 5),
                       "num_key_value_heads is 5, expected a divisor of num_attention_heads, 32"));
  EXPECT_TRUE(contains(refusal_with("num_key_value_heads", 64), "expected a divisor"));
  EXPECT_TRUE(contains(refusal_with("head_dim", 63), "head_dim is 63, expected an even number"));
  EXPECT_TRUE(contains(refusal_with("head_dim", 1 << 30), "head_dim is 1073741824, expected at"));
  EXPECT_TRUE(contains(refusal_with("hidden_size", 2050),
                       "hidden_size 2050 is no multiple of "
                       "num_attention_heads 32"));
}

TEST(ModelConfig, RefusesParameterCountsThatOverflow) {
  json source = tiny_llama();
  for (const char* key : {"hidden_size", "num_hidden_layers", "intermediate_size"}) {
    source[key] = 1 << 30;
  }
  EXPECT_TRUE(contains(refusal(source), "2^48 or more parameters"));
}

TEST(ModelConfig, RefusesUnknownRopeTypesByName) {
  EXPECT_TRUE(contains(refusal_with_scaling("rope_type", "yarn"),
                       "rope_scaling.rope_type is \"yarn\", expected \"default\" or \"llama3\""));
  EXPECT_TRUE(contains(refusal_with("rope_scaling", {{"type", "linear"}, {"factor", 2.0}}),
                       "rope_scaling.type is \"linear\""));
  EXPECT_TRUE(contains(refusal_with("rope_scaling", {{"factor", 2.0}}),
                       "rope_scaling.rope_type is missing"));
  EXPECT_TRUE(contains(refusal_with("rope_scaling", 2.0), "rope_scaling is 2.0, expected an obj"));
  const json nested = {{"full_attention", {{"rope_type", "default"}}}};
  EXPECT_TRUE(contains(refusal_with("rope_parameters", nested),
                       "rope_parameters.full_attention is an object"));
}

TEST(ModelConfig, RefusesBadLlama3Scaling) {
  for (const char* key :
       {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}) {
    EXPECT_TRUE(contains(refusal_with_scaling(key, nullptr),
                         "rope_scaling." + std::string(key) + " is missing"));
    EXPECT_TRUE(contains(refusal_with_scaling(key, -1),
                         "rope_scaling." + std::string(key) + " is -1, expected"));
  }
  EXPECT_TRUE(contains(refusal_with_scaling("factor", 0.5), "factor is 0.5, expected at least 1"));
  EXPECT_TRUE(contains(refusal_with_scaling("high_freq_factor", 1.0),
                       "high_freq_factor is 1.0, expected more than low_freq_factor, 1"));
}

TEST(ModelConfig, RefusesJsonThatIsNoObject) {
  EXPECT_TRUE(contains(refusal(json::array()), "the file holds an array, expected an object"));
}

TEST(ModelConfig, ComputesPlainFrequencies) {
  const ModelConfig config = parse_model_config(tiny_llama(), "config.json");
  const std::vector<double> frequencies = rope_inverse_frequencies(config);
  ASSERT_EQ(frequencies.size(), 32u);
  for (size_t i = 0; i < frequencies.size(); ++i) {
    const double expected = std::exp(-std::log(10000.0) * static_cast<double>(i) / 32.0);
    EXPECT_NEAR(frequencies[i] / expected, 1.0, 1e-13);
  }
}

// Llama-3.2-1B; the expected values come from a separate float64 program of the published formula.
TEST(ModelConfig, ComputesLlama3Frequencies) {
  const std::vector<double> frequencies =
      rope_inverse_frequencies(parse_model_config(llama_3_2(), "config.json"));
  ASSERT_EQ(frequencies.size(), 32u);
  EXPECT_DOUBLE_EQ(frequencies[0], 1.0);
  EXPECT_NEAR(frequencies[14], 0.0032114459947525913, 3.2e-17);
  EXPECT_NEAR(frequencies[15], 0.001290547928209264, 1.3e-17);
  EXPECT_NEAR(frequencies[16], 0.00042955679655936815, 4.3e-18);
  EXPECT_NEAR(frequencies[17], 9.70828780262767e-05, 9.7e-19);
  EXPECT_NEAR(frequencies[18], 1.9461638184831125e-05, 1.9e-19);
  EXPECT_NEAR(frequencies[31], 9.418306725434909e-08, 9.4e-22);
}

/// A directory that is removed at the end of its test.
class ModelConfigFile : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "overspill_config_XXXXXX").string();
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    directory_ = name;
  }
  void TearDown() override { fs::remove_all(directory_); }

  std::string load_refusal(ErrorCode code) const {
    try {
      load_model_config(directory_);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), code);
      return error.what();
    }
    return "";
  }

  fs::path directory_;
};

TEST_F(ModelConfigFile, LoadsFromFileAndDirectory) {
  std::ofstream(directory_ / "config.json") << tiny_llama();
  EXPECT_EQ(load_model_config(directory_).hidden_size, 2048u);
  EXPECT_EQ(load_model_config(directory_ / "config.json").hidden_size, 2048u);
}

TEST_F(ModelConfigFile, SaysWhatADirectoryHoldsWhenMissing) {
  const std::string message = load_refusal(ErrorCode::not_found);
  EXPECT_TRUE(contains(message, (directory_ / "config.json").string()));
  EXPECT_TRUE(contains(message, "a Hugging Face model directory holds config.json, model.safe"));
}

TEST_F(ModelConfigFile, RefusesTextThatIsNotJson) {
  std::ofstream(directory_ / "config.json") << "{\"hidden_size\": ";
  EXPECT_TRUE(contains(load_refusal(ErrorCode::invalid_file), "config.json: not JSON: "));
}

TEST_F(ModelConfigFile, RefusesNumbersThatOverflow) {
  std::ofstream(directory_ / "config.json") << "{\"rope_theta\": 1e999}";
  EXPECT_TRUE(contains(load_refusal(ErrorCode::invalid_file), "not JSON: "));
}

TEST_F(ModelConfigFile, LoadsRealModel) {
  const char* given = std::getenv("OVERSPILL_TEST_DATA");
  const fs::path root = given != nullptr ? given : OVERSPILL_SOURCE_DIR "/../shared/data";
  const fs::path path = root / "models" / "stories260K-hf";
  if (!fs::exists(path)) GTEST_SKIP() << "no " << path << "; set OVERSPILL_TEST_DATA";
  const ModelConfig config = load_model_config(path);
  EXPECT_EQ(config.num_key_value_heads, 4u);
  EXPECT_EQ(config.head_dim, 8u);
  EXPECT_TRUE(config.tie_word_embeddings);
  EXPECT_EQ(config.parameter_count(), 260'032u);
}

}  // namespace
}  // namespace overspill
