// Walks a layout's chunks and the tensors that cross them: what loading and saving state are made
// of. Private to engine/train.
#pragma once

#include <algorithm>
#include <vector>

#include "engine/plan/layout.h"
#include "engine/train/stage_progress.h"

namespace overspill {

/// A piece of a tensor inside a chunk.
struct ChunkPiece {
  const LayerTensor* tensor;
  uint64_t tensor_begin;  ///< first element of the tensor
  uint64_t chunk_begin;   ///< its place in the chunk
  uint64_t count;
  size_t tensor_index;  ///< over the whole model
};

/// Calls visit(layer, chunk index, pieces) for every chunk; progress counts parameter_bytes each.
template <class Visit>
void for_chunks(const Layout& layout, const char* what, uint64_t parameter_bytes,
                const Visit& visit) {
  uint64_t parameters = 0;
  for (const Chunk& chunk : layout.table.chunks) parameters += chunk.parameters;
  StageProgress progress(what, parameters * parameter_bytes);
  size_t first_tensor = 0;
  std::vector<ChunkPiece> pieces;
  for (uint32_t l = 0; l < layout.model.layers.size(); ++l) {
    const LayerShape& shape = layout.model.layers[l];
    for (uint32_t c = 0; c < layout.chunk_count(l); ++c) {
      const Chunk& chunk = layout.chunk(l, c);
      pieces.clear();
      for (size_t t = 0; t < shape.tensors.size(); ++t) {
        const LayerTensor& tensor = shape.tensors[t];
        const uint64_t begin = std::max(tensor.offset, chunk.begin);
        const uint64_t end =
            std::min(tensor.offset + tensor.elements, chunk.begin + chunk.parameters);
        if (begin >= end) continue;
        pieces.push_back(
            {&tensor, begin - tensor.offset, begin - chunk.begin, end - begin, first_tensor + t});
      }
      visit(l, c, pieces);
      progress.add(chunk.parameters * parameter_bytes);
    }
    first_tensor += shape.tensors.size();
  }
}

inline std::vector<const LayerTensor*> all_tensors(const ModelShape& model) {
  std::vector<const LayerTensor*> tensors;
  for (const LayerShape& layer : model.layers) {
    for (const LayerTensor& tensor : layer.tensors) tensors.push_back(&tensor);
  }
  return tensors;
}

/// Copies of the state take turns, so that all ranks write.
inline bool is_writer(const Layout& layout, const Chunk& chunk) {
  const PlanOptions& o = layout.options;
  return layout.owns(chunk) && (chunk.begin / layout.chunk_parameters) % o.replicas == o.replica;
}

}  // namespace overspill
