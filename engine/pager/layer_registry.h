// The layers that a program registers: their names, ties between them, and the shape that the
// engine stores. Pure data; one thread.
#pragma once

#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/model/layers.h"

namespace overspill {

struct TensorDescription {
  std::string name;
  std::vector<uint64_t> shape;
  std::optional<bool> decay{};  ///< default: from rank 2 on
  uint32_t group = 0;
  bool frozen = false;
  std::string tied_to{};  ///< another tensor, which this one is; empty: none
};

/// A tensor of a registered layer and where it is stored. Stored layers are those with parameters
/// of their own; they count apart from registered ones.
struct TensorPlace {
  std::string name;
  std::vector<uint64_t> shape;
  uint64_t elements = 0;
  std::string tied_to;
  uint32_t stored_layer = 0, stored_tensor = 0;  ///< in ModelShape
};

struct RegisteredLayer {
  std::string name;
  std::vector<TensorPlace> tensors;
  std::optional<uint32_t> own;  ///< its stored layer, if it has parameters of its own
  /// Stored layers that are held with it: its own and those of tied tensors, ascending.
  std::vector<uint32_t> stored{};
};

class LayerRegistry {
 public:
  /// Throws MisuseError: a name twice, an extent of 0, no tensors.
  uint32_t add(const std::string& name, std::span<const TensorDescription> tensors);
  /// Fixes the shape: follows ties, freezes what no pattern of `unfrozen` matches. Throws
  /// MisuseError or Error(invalid_config).
  void finish(const std::optional<std::vector<std::string>>& unfrozen);

  const std::vector<RegisteredLayer>& layers() const { return layers_; }
  const ModelShape& shape() const { return shape_; }
  /// A tensor's registered layer and its index there; nothing for a name that is not known.
  std::optional<std::pair<uint32_t, uint32_t>> find(const std::string& name) const;
  const LayerTensor& stored(const TensorPlace& place) const {
    return shape_.layers[place.stored_layer].tensors[place.stored_tensor];
  }
  /// The registered layer that a stored one belongs to.
  const RegisteredLayer& owner(uint32_t stored_layer) const;
  /// How many tensors are tied to one of a stored layer.
  uint32_t ties(uint32_t stored_layer, uint32_t tensor) const {
    return ties_[stored_layer][tensor];
  }
  /// Stored layers that a registered one brings beside its own, at most.
  uint32_t most_tied_layers() const;
  uint32_t groups() const { return groups_; }

 private:
  void follow_tie(const RegisteredLayer& layer, TensorPlace& tensor);

  std::vector<RegisteredLayer> layers_;
  std::map<std::string, std::pair<uint32_t, uint32_t>> tensors_;
  std::map<std::string, uint32_t> names_;
  ModelShape shape_;
  std::vector<uint32_t> owners_;             ///< of each stored layer
  std::vector<std::vector<uint32_t>> ties_;  ///< by stored layer and tensor
  uint32_t groups_ = 1;
};

}  // namespace overspill
