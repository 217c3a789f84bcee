// How the layers are cut into chunks, and how each chunk's parameters are updated. Pure data.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/model/layers.h"
#include "optim/optimizer.h"

namespace overspill {

/// A piece of a layer's flattened parameters: the unit of paging.
struct Chunk {
  uint32_t layer;
  uint64_t begin;       ///< first parameter, in the layer
  uint64_t parameters;  ///< multiple of kParameterAlignment
  uint64_t exact;       ///< parameters with exact moments
  uint32_t first_run;   ///< its runs: [first_run, first_run + run_count) in ChunkTable::runs
  uint32_t run_count;   ///< 0: nothing in it trains here, and it has no state and no gradient
  uint32_t owner = 0;   ///< the rank that updates it
  bool trains = false;  ///< something in it trains, there

  bool trainable() const { return run_count > 0; }
};

/// One of the ranks that share a model's state: each owns 1/count of every layer.
struct RankOf {
  uint32_t index = 0, count = 1;
  bool whole = false;  ///< keeps the other ranks' weights as well (ZeRO-1 and 2)
};
/// The parameters of a layer that each rank owns: its padded size over the ranks, padded again so
/// that it divides.
uint64_t shard_parameters(const LayerShape& layer, uint32_t ranks);

/// Every layer's chunks in order: [first[layer], first[layer + 1]).
struct ChunkTable {
  std::vector<Chunk> chunks;
  std::vector<uint32_t> first;
  std::vector<UpdateRun> runs;
  std::vector<std::vector<FactoredMatrix>> matrices;  ///< by layer: those with factored moments
  uint64_t factored_elements = 0;                     ///< of all of them
};
/// The chunks of a rank's part of every layer, or of all parts; `begin` counts from the layer's
/// first parameter. Chunks of other ranks have no runs.
ChunkTable cut_chunks(const ModelShape& model, uint64_t chunk_parameters,
                      const OptimizerSettings& settings, RankOf rank = {});

/// Norms, biases and tensors too small to gain by it keep float32 moments in int8 state; with
/// adafactor all that are no matrices do.
bool has_exact_moments(const OptimizerSettings& settings, const LayerTensor& tensor);
/// Adafactor's matrices have no moments in pages.
bool has_factored_moments(const OptimizerSettings& settings, const LayerTensor& tensor);

}  // namespace overspill
