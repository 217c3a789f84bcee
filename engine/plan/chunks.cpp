// Cuts layers into chunks and chunks into update runs, one for each trainable tensor in them.
#include "engine/plan/chunks.h"

#include <algorithm>

#include "engine/base/units.h"

namespace overspill {
namespace {

constexpr uint64_t kSmallTensor = 4096;
constexpr uint64_t kExactAlignment = 16;  // exact moments start at whole cache lines

void add_matrices(const LayerShape& layer, const OptimizerSettings& settings, ChunkTable& table) {
  std::vector<FactoredMatrix>& matrices = table.matrices.emplace_back();
  for (const LayerTensor& tensor : layer.tensors) {
    if (!tensor.trainable || !has_factored_moments(settings, tensor)) continue;
    const uint64_t rows = tensor.shape[0];
    matrices.push_back({.offset = tensor.offset,
                        .rows = rows,
                        .columns = tensor.elements / rows,
                        .first = table.factored_elements});
    table.factored_elements += matrices.back().elements();
  }
}

void add_runs(const LayerShape& layer, const OptimizerSettings& settings, Chunk& chunk,
              ChunkTable& table) {
  const uint64_t chunk_end = chunk.begin + chunk.parameters;
  for (const LayerTensor& tensor : layer.tensors) {
    const uint64_t begin = std::max(tensor.offset, chunk.begin);
    const uint64_t end = std::min(tensor.offset + tensor.elements, chunk_end);
    if (!tensor.trainable || begin >= end) continue;
    UpdateRun run{.begin = begin - chunk.begin,
                  .end = end - chunk.begin,
                  .decay = tensor.decay,
                  .group = tensor.group};
    if (has_exact_moments(settings, tensor)) {
      run.exact = true;
      run.exact_begin = chunk.exact;
      chunk.exact += round_up(end - begin, kExactAlignment);
    }
    if (has_factored_moments(settings, tensor)) {
      run.matrix =
          *std::ranges::find(table.matrices[chunk.layer], tensor.offset, &FactoredMatrix::offset);
    }
    table.runs.push_back(run);
    ++chunk.run_count;
  }
}

/// The chunks of one rank's part of a layer.
void cut_part(uint32_t index, const LayerShape& layer, uint64_t chunk_parameters,
              const OptimizerSettings& settings, RankOf owner, bool own, ChunkTable& table) {
  const uint64_t shard = shard_parameters(layer, owner.count);
  const uint64_t end = (owner.index + 1) * shard;
  for (uint64_t begin = end - shard; begin < end; begin += chunk_parameters) {
    Chunk chunk{.layer = index,
                .begin = begin,
                .parameters = std::min(chunk_parameters, end - begin),
                .exact = 0,
                .first_run = static_cast<uint32_t>(table.runs.size()),
                .run_count = 0,
                .owner = owner.index};
    chunk.trains = std::ranges::any_of(layer.tensors, [&](const LayerTensor& t) {
      return t.trainable && t.offset < begin + chunk.parameters && begin < t.offset + t.elements;
    });
    if (own) add_runs(layer, settings, chunk, table);
    table.chunks.push_back(chunk);
  }
}

}  // namespace

bool has_exact_moments(const OptimizerSettings& settings, const LayerTensor& tensor) {
  if (settings.kind == OptimizerKind::adafactor) return tensor.shape.size() < 2;
  return settings.state == StateFormat::int8 &&
         (tensor.shape.size() < 2 || tensor.elements < kSmallTensor);
}

bool has_factored_moments(const OptimizerSettings& settings, const LayerTensor& tensor) {
  return settings.kind == OptimizerKind::adafactor && tensor.shape.size() >= 2;
}

uint64_t shard_parameters(const LayerShape& layer, uint32_t ranks) {
  return round_up(ceil_div(layer.padded, ranks), kParameterAlignment);
}

ChunkTable cut_chunks(const ModelShape& model, uint64_t chunk_parameters,
                      const OptimizerSettings& settings, RankOf rank) {
  ChunkTable table;
  for (uint32_t l = 0; l < model.layers.size(); ++l) {
    table.first.push_back(static_cast<uint32_t>(table.chunks.size()));
    const LayerShape& layer = model.layers[l];
    add_matrices(layer, settings, table);
    const uint32_t first = rank.whole ? 0 : rank.index;
    const uint32_t last = rank.whole ? rank.count - 1 : rank.index;
    for (uint32_t owner = first; owner <= last; ++owner) {
      cut_part(l, layer, chunk_parameters, settings, {owner, rank.count}, owner == rank.index,
               table);
    }
  }
  table.first.push_back(static_cast<uint32_t>(table.chunks.size()));
  return table;
}

}  // namespace overspill
