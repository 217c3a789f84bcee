// The model as a list of layers (embedding, blocks, head), and where each tensor lies in its
// layer's flattened parameters. Pure data.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/model/model_config.h"

namespace overspill {

/// A layer's flattened size is a multiple of this, so that every page of it is a multiple of 4096
/// bytes in every format.
inline constexpr uint64_t kParameterAlignment = 4096;
/// Every tensor starts at a multiple of this many parameters: a block of coded optimizer state
/// (optim/optimizer.h) belongs to one tensor.
inline constexpr uint64_t kTensorAlignment = 256;

enum class LayerKind : uint8_t { embedding, block, head };

struct LayerTensor {
  std::string name;  ///< Hugging Face's
  std::vector<uint64_t> shape;
  uint64_t offset;  ///< in parameters from the layer's start
  uint64_t elements;
  bool decay;             ///< weight decay applies (rank >= 2)
  bool trainable = true;  ///< else frozen: no gradient, no optimizer state, never written
  uint32_t group = 0;     ///< learning-rate group
};

struct LayerShape {
  LayerKind kind;
  std::vector<LayerTensor> tensors;
  uint64_t parameters = 0;  ///< without padding
  uint64_t padded = 0;      ///< flattened size

  bool trainable() const { return trainable_parameters() > 0; }
  uint64_t trainable_parameters() const;
  struct Range {
    uint64_t begin, end;
  };
  /// Parameters that no gradient is made for: padding, and frozen tensors.
  std::vector<Range> untrained() const;
};

struct ModelShape {
  ModelConfig config;
  std::vector<LayerShape> layers;  ///< embedding, num_hidden_layers blocks, head

  uint32_t head() const { return static_cast<uint32_t>(layers.size()) - 1; }
  uint64_t parameters() const;
  /// The backward ends at this layer: those below it are frozen. At least one tensor trains.
  uint32_t lowest_trainable() const;
  uint32_t highest_trainable() const;
};

/// Indices of a block's tensors in LayerShape::tensors.
enum BlockTensor : uint32_t {
  kInputNorm,
  kQuery,
  kKey,
  kValue,
  kAttentionOut,
  kPostNorm,
  kGate,
  kUp,
  kDown,
  kBlockTensors
};
/// The head's: final norm, then the output projection unless it is tied to the embedding.
enum HeadTensor : uint32_t { kFinalNorm, kOutput };

ModelShape llama_layers(const ModelConfig& config);

/// Multiply-adds count as 2 FLOPs. Forward of one layer over `tokens` tokens in sequences of
/// `sequence_len` (causal attention counted at half the square).
uint64_t forward_flops(const ModelShape& model, uint32_t layer, uint64_t tokens,
                       uint64_t sequence_len);
/// Backward of one layer (of the head: forward too): recomputation, the gradient of the input, and
/// those of trainable weights.
uint64_t backward_flops(const ModelShape& model, uint32_t layer, uint64_t tokens,
                        uint64_t sequence_len);

}  // namespace overspill
