// Weights: read, drawn and written.
#include "engine/train/model_state.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "engine/base/error.h"
#include "engine/base/parallel.h"
#include "engine/base/random.h"
#include "engine/base/units.h"
#include "engine/train/state_chunks.h"
#include "engine/train/write_together.h"
#include "optim/split_master.h"

namespace overspill {
namespace {

constexpr uint64_t kBlock = 1 << 18;  // floats converted at a time: 1 MiB

/// Fills every master through fill(piece, first element, floats), a block at a time.
template <class Fill>
void fill_masters(PageStore& store, const char* what, const Fill& fill) {
  const Layout& layout = store.layout();
  const bool split = layout.options.precision == Precision::bf16;
  std::vector<float> block(split ? kBlock : 0);
  for_chunks(layout, what, 4, [&](uint32_t l, uint32_t c, const std::vector<ChunkPiece>& pieces) {
    const uint64_t remainder_bytes = layout.state(layout.chunk(l, c)).remainder_bytes();
    const PageId w = layout.weight(l, c), o = layout.optimizer(l, c);
    const std::span<std::byte> weights_page = store.buffer(w);
    std::byte* weights = weights_page.data();
    std::byte* state = remainder_bytes > 0 ? store.buffer(o).data() : nullptr;
    std::memset(weights, 0, weights_page.size());
    if (state != nullptr) std::memset(state, 0, remainder_bytes);
    for (const ChunkPiece& piece : pieces) {
      if (!split) {
        fill(piece, piece.tensor_begin,
             std::span(reinterpret_cast<float*>(weights) + piece.chunk_begin, piece.count));
        continue;
      }
      for (uint64_t at = 0; at < piece.count; at += kBlock) {
        const std::span<float> part(block.data(), std::min(kBlock, piece.count - at));
        fill(piece, piece.tensor_begin + at, part);
        auto* hi = reinterpret_cast<uint16_t*>(weights) + piece.chunk_begin + at;
        const uint64_t first = piece.chunk_begin + at;
        for (size_t i = 0; i < part.size(); ++i) {
          const SplitMaster master = split_master(part[i]);
          hi[i] = master.weight;
          // Frozen, or another rank's: as compute uses it.
          if (state != nullptr && piece.tensor->trainable) {
            reinterpret_cast<int16_t*>(state)[first + i] = master.remainder;
          }
        }
      }
    }
    store.store(w);
    if (state != nullptr) store.store(o, remainder_bytes);
  });
}

}  // namespace

void check_model_tensors(const ModelShape& model, const ModelTensors& tensors) {
  for (const LayerTensor* tensor : all_tensors(model)) tensors.require(tensor->name, tensor->shape);
}

void load_weights(PageStore& store, const ModelTensors& tensors) {
  check_model_tensors(store.layout().model, tensors);
  fill_masters(store, "loading weights",
               [&](const ChunkPiece& piece, uint64_t begin, std::span<float> out) {
                 tensors.read_floats(piece.tensor->name, begin, out);
               });
}

void initialize_weights(PageStore& store, uint64_t seed) {
  const auto range = static_cast<float>(store.layout().model.config.initializer_range);
  fill_masters(store, "drawing weights",
               [&](const ChunkPiece& piece, uint64_t begin, std::span<float> out) {
                 if (!piece.tensor->decay) return std::fill(out.begin(), out.end(), 1.0f);
                 const uint64_t key = mix64(seed) ^ mix64(piece.tensor_index + 1);
                 parallel_blocks(out.size(), 1 << 14, [&](uint64_t first, uint64_t last) {
                   for (uint64_t i = first; i < last; ++i)
                     out[i] = range * random_normal(key, begin + i);
                 });
               });
}

void export_weights(PageStore& store, const std::filesystem::path& directory, const Ranks& ranks) {
  const Layout& layout = store.layout();
  const bool split = layout.options.precision == Precision::bf16;
  std::vector<TensorSpec> specs;
  for (const LayerTensor* tensor : all_tensors(layout.model)) {
    specs.push_back({tensor->name, tensor->shape, split ? "BF16" : "F32"});
  }
  const auto open = [&](WriterRole role) {
    return ModelTensorsWriter(directory, std::move(specs), ModelTensorsWriter::kShardBytes, role);
  };
  auto writer = open_together(ranks, open);
  const uint32_t weight_bytes = layout.options.weight_bytes();
  const auto write_chunk = [&](uint32_t l, uint32_t c, const std::vector<ChunkPiece>& pieces) {
    if (!is_writer(layout, layout.chunk(l, c))) return;
    const std::span<const std::byte> weights = store.load(layout.weight(l, c));
    for (const ChunkPiece& piece : pieces) {
      writer.write(piece.tensor_index, piece.tensor_begin,
                   weights.subspan(piece.chunk_begin * weight_bytes, piece.count * weight_bytes));
    }
  };
  for_chunks(layout, "saving weights", weight_bytes, write_chunk);
  complete_together(ranks, writer);
}

}  // namespace overspill
