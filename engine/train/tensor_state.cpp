// Walks the chunks that a tensor crosses.
#include "engine/train/tensor_state.h"

#include <algorithm>
#include <vector>

#include "engine/base/dtype.h"
#include "optim/split_master.h"

namespace overspill {
namespace {

/// A chunk's part of a tensor, in memory.
struct ChunkPart {
  std::byte* weights;   ///< bf16 or float32
  int16_t* remainders;  ///< null where there are none: float32, frozen, another rank's
  uint64_t first;       ///< element of the tensor
  uint64_t count;
};

/// Calls visit(part) for each chunk that holds a part of the tensor; with `stores`, what it leaves
/// goes home.
template <class Visit>
void for_parts(PageStore& store, uint32_t layer, const LayerTensor& tensor, bool stores,
               const Visit& visit) {
  const Layout& layout = store.layout();
  for (uint32_t c = 0; c < layout.chunk_count(layer); ++c) {
    const Chunk& chunk = layout.chunk(layer, c);
    const uint64_t begin = std::max(tensor.offset, chunk.begin);
    const uint64_t end = std::min(tensor.offset + tensor.elements, chunk.begin + chunk.parameters);
    if (begin >= end) continue;
    const PageId w = layout.weight(layer, c), o = layout.optimizer(layer, c);
    const uint64_t remainder_bytes = tensor.trainable ? layout.state(chunk).remainder_bytes() : 0;
    const uint64_t at = begin - chunk.begin;
    ChunkPart part{store.load(w).data() + at * layout.options.weight_bytes(), nullptr,
                   begin - tensor.offset, end - begin};
    if (remainder_bytes > 0) {
      part.remainders = reinterpret_cast<int16_t*>(store.load(o, remainder_bytes).data()) + at;
    }
    visit(part);
    if (!stores) continue;
    store.store(w);
    if (remainder_bytes > 0) store.store(o, remainder_bytes);
  }
}

}  // namespace

void write_tensor(PageStore& store, uint32_t layer, const LayerTensor& tensor,
                  std::span<const float> values) {
  const bool split = store.layout().options.precision == Precision::bf16;
  for_parts(store, layer, tensor, true, [&](const ChunkPart& part) {
    const std::span<const float> from = values.subspan(part.first, part.count);
    if (!split) {
      std::ranges::copy(from, reinterpret_cast<float*>(part.weights));
      return;
    }
    auto* weights = reinterpret_cast<uint16_t*>(part.weights);
    for (uint64_t i = 0; i < part.count; ++i) {
      const SplitMaster master = split_master(from[i]);
      weights[i] = master.weight;
      if (part.remainders != nullptr) part.remainders[i] = master.remainder;
    }
  });
}

void read_tensor(PageStore& store, uint32_t layer, const LayerTensor& tensor, bool as_computed,
                 const Ranks& ranks, std::span<float> values) {
  const Layout& layout = store.layout();
  const bool split = layout.options.precision == Precision::bf16;
  for_parts(store, layer, tensor, false, [&](const ChunkPart& part) {
    float* out = values.data() + part.first;
    if (!split) {
      std::copy_n(reinterpret_cast<const float*>(part.weights), part.count, out);
      return;
    }
    const auto* weights = reinterpret_cast<const uint16_t*>(part.weights);
    for (uint64_t i = 0; i < part.count; ++i) {
      const bool rounded = as_computed || part.remainders == nullptr;
      out[i] = rounded ? bf16_to_float(weights[i]) : join_master(weights[i], part.remainders[i]);
    }
  });
  if (!layout.options.gathers_weights()) return;
  // Every rank's part of the whole layer, of which the tensor is cut out.
  const uint64_t shard = layout.shard(layer), own = layout.options.rank * shard;
  std::vector<float> part(shard), whole(layout.whole(layer));
  const uint64_t end = tensor.offset + tensor.elements;
  const uint64_t first = std::clamp(tensor.offset, own, own + shard);
  const uint64_t last = std::clamp(end, own, own + shard);
  std::copy_n(values.data() + (first - tensor.offset) * (last > first), last - first,
              part.data() + (first - own));
  ranks.groups().shard->all_gather(std::as_bytes(std::span(part)),
                                   std::as_writable_bytes(std::span(whole)));
  std::copy_n(whole.data() + tensor.offset, tensor.elements, values.data());
}

}  // namespace overspill
