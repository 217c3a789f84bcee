// Which tensors train and in which group: patterns match from the start, modules anywhere, and
// what matches nothing or twice is refused by name.
#include "engine/train/parameter_groups.h"

#include <gtest/gtest.h>

#include "engine/base/error.h"
#include "tests/unit/engine/plan/test_models.h"

namespace overspill {
namespace {

using Patterns = std::vector<std::string>;
using Groups = std::vector<LrGroup>;
using test::tiny_model;

ModelShape grouped(bool tied, const std::optional<Patterns>& unfrozen, const Groups& groups = {}) {
  ModelShape model = tiny_model(tied);
  apply_parameter_groups(model, unfrozen, groups);
  return model;
}

std::vector<std::string> trained(const ModelShape& model) {
  std::vector<std::string> names;
  for (const LayerShape& layer : model.layers) {
    for (const LayerTensor& tensor : layer.tensors) {
      if (tensor.trainable) names.push_back(tensor.name);
    }
  }
  return names;
}

void expect_refusal(bool tied, const std::optional<Patterns>& unfrozen, const Groups& groups,
                    const Patterns& parts) {
  try {
    grouped(tied, unfrozen, groups);
    ADD_FAILURE() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_config);
    for (const std::string& part : parts) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
  }
}

TEST(ParameterGroups, EverythingTrainsWithoutAKey) {
  const ModelShape model = grouped(false, std::nullopt);
  EXPECT_EQ(trained(model).size(), 1u + 3 * kBlockTensors + 2);
  EXPECT_EQ(model.lowest_trainable(), 0u);
  EXPECT_EQ(model.highest_trainable(), model.head());
  EXPECT_TRUE(describe_parameter_groups(model, {}).empty());
}

TEST(ParameterGroups, DecayIsForMatricesOnly) {
  for (const LayerShape& layer : tiny_model(false).layers) {
    for (const LayerTensor& tensor : layer.tensors) {
      EXPECT_EQ(tensor.decay, tensor.shape.size() == 2) << tensor.name;
      EXPECT_EQ(tensor.decay, tensor.name.find("norm") == std::string::npos) << tensor.name;
    }
  }
}

TEST(ParameterGroups, PatternsMatchFromTheStartAndAreFreeAtTheEnd) {
  const ModelShape model =
      grouped(false, Patterns{"model.layers.[12].self_attn.(q|k)_proj", "^lm_head.weight$"});
  EXPECT_EQ(trained(model), (Patterns{"model.layers.1.self_attn.q_proj.weight",
                                      "model.layers.1.self_attn.k_proj.weight",
                                      "model.layers.2.self_attn.q_proj.weight",
                                      "model.layers.2.self_attn.k_proj.weight", "lm_head.weight"}));
  EXPECT_EQ(model.lowest_trainable(), 2u);
  EXPECT_EQ(model.highest_trainable(), model.head());
  expect_refusal(false, Patterns{"self_attn"}, {}, {"\"self_attn\" matches no tensor"});
  expect_refusal(false, Patterns{"^model.layers$"}, {}, {"matches no tensor"});
}

TEST(ParameterGroups, PatternsWithoutATensorAreRefusedWithNames) {
  expect_refusal(false, Patterns{"lm_head", "model.layers.7"}, {},
                 {"unfrozen_parameters[1]", "\"model.layers.7\"", "model.embed_tokens.weight",
                  "model.layers.0.self_attn.q_proj.weight", "lm_head.weight"});
  expect_refusal(true, Patterns{"lm_head"}, {}, {"lm_head is tied to model.embed_tokens"});
  expect_refusal(false, Patterns{}, {}, {"nothing to train"});
}

TEST(ParameterGroups, FlawedPatternsAreNamed) {
  EXPECT_EQ(pattern_flaw("model.layers.2[0-9].mlp"), "");
  for (const char* rows : {"a$[:32000]", "a[32000:]", "a[1:2]"}) {
    EXPECT_NE(pattern_flaw(rows).find("some rows of a tensor"), std::string::npos) << rows;
  }
  EXPECT_NE(pattern_flaw("(lm_head").find("no regular expression"), std::string::npos);
  expect_refusal(false, Patterns{"lm_head", "a(b"}, {}, {"unfrozen_parameters[1]: \"a(b\""});
}

TEST(ParameterGroups, ModulesPutTensorsInGroups) {
  const Groups groups = {{"ends", {"embed_tokens", "lm_head"}, 1e-5}, {"mlp", {".mlp."}, 3e-5}};
  const ModelShape model =
      grouped(false, Patterns{"model.embed", "model.layers.0", "lm_head"}, groups);
  for (const LayerShape& layer : model.layers) {
    for (const LayerTensor& tensor : layer.tensors) {
      const bool end =
          tensor.name == "model.embed_tokens.weight" || tensor.name == "lm_head.weight";
      const bool mlp = tensor.name.find("mlp") != std::string::npos;
      EXPECT_EQ(tensor.group, end ? 1u : mlp ? 2u : 0u) << tensor.name;
    }
  }
  const auto lines = describe_parameter_groups(model, groups);
  ASSERT_EQ(lines.size(), 3u);
  EXPECT_EQ(lines[0].substr(0, 7), "trains ");
  EXPECT_NE(lines[0].find("(19 tensors frozen)"), std::string::npos) << lines[0];
  EXPECT_EQ(lines[1].substr(0, 14), "lr group ends:");
  EXPECT_NE(lines[2].find(" at 3e-05"), std::string::npos) << lines[2];
}

TEST(ParameterGroups, GroupsWithoutATensorOrWithASharedOneAreRefused) {
  expect_refusal(false, std::nullopt, {{"a", {"mlp", "vision"}, 1e-3}},
                 {"lr_groups[0].modules", "contains \"vision\"", "model.embed_tokens.weight"});
  expect_refusal(false, std::nullopt, {{"a", {"mlp"}, 1e-3}, {"b", {"layers.1.", "norm"}, 1e-3}},
                 {"model.layers.1.mlp.gate_proj.weight is in both \"a\" and \"b\""});
}

}  // namespace
}  // namespace overspill
