// Registered layers become the shape that is stored.
#include "engine/pager/layer_registry.h"

#include <gtest/gtest.h>

#include "engine/pager/misuse.h"

namespace overspill {
namespace {

TensorDescription tensor(const std::string& name, std::vector<uint64_t> shape,
                         const std::string& tied_to = "") {
  return {.name = name, .shape = std::move(shape), .tied_to = tied_to};
}

LayerRegistry tied_registry() {
  LayerRegistry registry;
  const std::vector<TensorDescription> head = {tensor("logits", {10, 4}, "words")};
  const std::vector<TensorDescription> norm = {tensor("norm", {4})};
  const std::vector<TensorDescription> embedding = {tensor("words", {10, 4}),
                                                    tensor("places", {7, 4})};
  registry.add("head", head);  // before what it is tied to
  registry.add("norm", norm);
  registry.add("embedding", embedding);
  registry.finish(std::nullopt);
  return registry;
}

TEST(LayerRegistry, StoresLayersWithParametersOfTheirOwn) {
  const LayerRegistry registry = tied_registry();
  ASSERT_EQ(registry.layers().size(), 3u);
  EXPECT_EQ(registry.shape().layers.size(), 2u);
  EXPECT_FALSE(registry.layers()[0].own);
  EXPECT_EQ(registry.layers()[2].own, 1u);
  EXPECT_EQ(registry.layers()[0].stored, std::vector<uint32_t>{1});
  EXPECT_EQ(registry.owner(1).name, "embedding");
  EXPECT_EQ(registry.ties(1, 0), 1u);
  EXPECT_EQ(registry.ties(1, 1), 0u);
  EXPECT_EQ(registry.most_tied_layers(), 1u);
}

TEST(LayerRegistry, TensorsBeginAtBlocksAndLayersAtPages) {
  const LayerRegistry registry = tied_registry();
  const LayerShape& embedding = registry.shape().layers[1];
  EXPECT_EQ(embedding.tensors[0].offset, 0u);
  EXPECT_EQ(embedding.tensors[1].offset, kTensorAlignment);
  EXPECT_EQ(embedding.padded, kParameterAlignment);
  EXPECT_EQ(embedding.parameters, 68u);
  EXPECT_TRUE(embedding.tensors[0].decay);
  EXPECT_FALSE(registry.shape().layers[0].tensors[0].decay);
}

TEST(LayerRegistry, FreezesWhatNoPatternMatches) {
  LayerRegistry registry;
  std::vector<TensorDescription> tensors = {tensor("a.weight", {4}), tensor("b.weight", {4}),
                                            tensor("c.weight", {4})};
  tensors[1].frozen = true;
  registry.add("layer", tensors);
  registry.finish({{"a", "b"}});
  const auto& stored = registry.shape().layers[0].tensors;
  EXPECT_TRUE(stored[0].trainable);
  EXPECT_FALSE(stored[1].trainable);  // as it was registered
  EXPECT_FALSE(stored[2].trainable);
  LayerRegistry none;
  none.add("layer", tensors);
  EXPECT_THROW(none.finish({{"nothing"}}), Error);
}

TEST(LayerRegistry, RefusesTiesThatLeadNowhere) {
  const auto refused = [](const TensorDescription& other, const TensorDescription& tied) {
    LayerRegistry registry;
    registry.add("a", std::vector{other});
    registry.add("b", std::vector{tied});
    try {
      registry.finish(std::nullopt);
    } catch (const MisuseError& error) {
      return error.kind() == Misuse::bad_argument;
    }
    return false;
  };
  EXPECT_TRUE(refused(tensor("w", {4}), tensor("t", {4}, "nothing")));
  EXPECT_TRUE(refused(tensor("w", {4}), tensor("t", {5}, "w")));
  EXPECT_TRUE(refused(tensor("w", {4}), tensor("t", {4}, "t")));
  EXPECT_FALSE(refused(tensor("w", {4}), tensor("t", {4}, "w")));
}

}  // namespace
}  // namespace overspill
