// Names, ties and offsets.
#include "engine/pager/layer_registry.h"

#include <algorithm>
#include <set>

#include "engine/base/units.h"
#include "engine/pager/misuse.h"
#include "engine/train/parameter_groups.h"

namespace overspill {
namespace {

constexpr uint64_t kMostElements = uint64_t{1} << 48;

uint64_t checked_elements(const std::string& layer, const TensorDescription& tensor) {
  uint64_t elements = 1;
  for (const uint64_t extent : tensor.shape) {
    if (extent == 0 || extent > kMostElements / elements) {
      refuse(
          Misuse::bad_argument,
          "layer \"{}\": tensor \"{}\" has the shape [{}]: extents are positive and a tensor has "
          "at most 2^48 elements",
          layer, tensor.name, fmt::join(tensor.shape, ", "));
    }
    elements *= extent;
  }
  return elements;
}

LayerTensor stored_tensor(const TensorDescription& tensor, uint64_t elements, uint64_t end) {
  return {.name = tensor.name,
          .shape = tensor.shape,
          .offset = round_up(end, kTensorAlignment),
          .elements = elements,
          .decay = tensor.decay.value_or(tensor.shape.size() >= 2),
          .trainable = !tensor.frozen,
          .group = tensor.group};
}

}  // namespace

uint32_t LayerRegistry::add(const std::string& name, std::span<const TensorDescription> tensors) {
  if (name.empty()) refuse(Misuse::bad_argument, "a layer without a name: give it one");
  if (tensors.empty()) refuse(Misuse::bad_argument, "layer \"{}\" has no tensors", name);
  if (names_.contains(name)) {
    refuse(Misuse::duplicate_name, "layer \"{}\" is registered already; names are unique", name);
  }
  std::set<std::string> own;
  RegisteredLayer layer{.name = name, .tensors = {}, .own = {}};
  LayerShape shape{.kind = LayerKind::block, .tensors = {}};
  for (const TensorDescription& tensor : tensors) {
    if (tensor.name.empty()) {
      refuse(Misuse::bad_argument, "layer \"{}\": a tensor without a name", name);
    }
    if (tensors_.contains(tensor.name) || !own.insert(tensor.name).second) {
      refuse(Misuse::duplicate_name,
             "layer \"{}\": tensor \"{}\" is registered already; names are unique in an engine",
             name, tensor.name);
    }
    if (tensor.frozen && !tensor.tied_to.empty()) {
      refuse(Misuse::bad_argument,
             "layer \"{}\": tensor \"{}\" is frozen and tied to \"{}\": freeze that one, which "
             "both are",
             name, tensor.name, tensor.tied_to);
    }
    const uint64_t elements = checked_elements(name, tensor);
    TensorPlace place{tensor.name, tensor.shape, elements, tensor.tied_to};
    if (tensor.tied_to.empty()) {
      place.stored_tensor = static_cast<uint32_t>(shape.tensors.size());
      shape.tensors.push_back(stored_tensor(tensor, elements, shape.padded));
      shape.parameters += elements;
      shape.padded = shape.tensors.back().offset + elements;
    }
    layer.tensors.push_back(std::move(place));
  }
  const auto index = static_cast<uint32_t>(layers_.size());
  if (!shape.tensors.empty()) {
    shape.padded = round_up(shape.padded, kParameterAlignment);
    layer.own = static_cast<uint32_t>(shape_.layers.size());
    for (TensorPlace& place : layer.tensors) place.stored_layer = *layer.own;
    shape_.layers.push_back(std::move(shape));
    owners_.push_back(index);
  }
  for (uint32_t t = 0; t < layer.tensors.size(); ++t) tensors_[layer.tensors[t].name] = {index, t};
  for (const TensorDescription& tensor : tensors) groups_ = std::max(groups_, tensor.group + 1);
  names_[name] = index;
  layers_.push_back(std::move(layer));
  return index;
}

std::optional<std::pair<uint32_t, uint32_t>> LayerRegistry::find(const std::string& name) const {
  const auto found = tensors_.find(name);
  return found == tensors_.end() ? std::nullopt : std::optional(found->second);
}

const RegisteredLayer& LayerRegistry::owner(uint32_t stored_layer) const {
  return layers_[owners_[stored_layer]];
}

void LayerRegistry::follow_tie(const RegisteredLayer& layer, TensorPlace& tensor) {
  const auto target = find(tensor.tied_to);
  if (!target) {
    refuse(Misuse::bad_argument,
           "layer \"{}\": tensor \"{}\" is tied to \"{}\", which no layer has", layer.name,
           tensor.name, tensor.tied_to);
  }
  const TensorPlace& other = layers_[target->first].tensors[target->second];
  if (!other.tied_to.empty() || other.shape != tensor.shape) {
    refuse(Misuse::bad_argument,
           "layer \"{}\": tensor \"{}\" [{}] is tied to \"{}\" [{}]{}; a tensor is tied to one of "
           "the same shape that is not tied itself",
           layer.name, tensor.name, fmt::join(tensor.shape, ", "), other.name,
           fmt::join(other.shape, ", "), other.tied_to.empty() ? "" : ", which is tied");
  }
  tensor.stored_layer = other.stored_layer;
  tensor.stored_tensor = other.stored_tensor;
  ++ties_[tensor.stored_layer][tensor.stored_tensor];
}

void LayerRegistry::finish(const std::optional<std::vector<std::string>>& unfrozen) {
  if (shape_.layers.empty()) {
    refuse(Misuse::bad_argument, "no layer with parameters of its own is registered");
  }
  ties_.clear();
  for (const LayerShape& layer : shape_.layers) ties_.emplace_back(layer.tensors.size());
  for (RegisteredLayer& layer : layers_) {
    std::set<uint32_t> stored;
    if (layer.own) stored.insert(*layer.own);
    for (TensorPlace& tensor : layer.tensors) {
      if (!tensor.tied_to.empty()) follow_tie(layer, tensor);
      stored.insert(tensor.stored_layer);
    }
    layer.stored.assign(stored.begin(), stored.end());
  }
  if (!unfrozen) return;
  ModelShape matched = shape_;
  apply_parameter_groups(matched, unfrozen, {});
  for (size_t l = 0; l < shape_.layers.size(); ++l) {
    for (size_t t = 0; t < shape_.layers[l].tensors.size(); ++t) {
      shape_.layers[l].tensors[t].trainable &= matched.layers[l].tensors[t].trainable;
    }
  }
}

uint32_t LayerRegistry::most_tied_layers() const {
  size_t most = 0;
  for (const RegisteredLayer& layer : layers_) {
    most = std::max(most, layer.stored.size() - (layer.own ? 1 : 0));
  }
  return static_cast<uint32_t>(most);
}

}  // namespace overspill
