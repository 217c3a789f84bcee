// Walks chunks and the tensors that cross them.
#include "engine/train/model_state.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "engine/base/error.h"
#include "engine/base/parallel.h"
#include "engine/base/random.h"
#include "engine/train/stage_progress.h"
#include "optim/split_master.h"

namespace overspill {
namespace {

constexpr uint64_t kBlock = 1 << 18;  // floats converted at a time: 1 MiB

/// A piece of a tensor inside a chunk.
struct Piece {
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
  for (const Chunk& chunk : layout.chunks) parameters += chunk.parameters;
  StageProgress progress(what, parameters * parameter_bytes);
  size_t first_tensor = 0;
  std::vector<Piece> pieces;
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

/// Fills every master through fill(piece, first element, floats), a block at a time.
template <class Fill>
void fill_masters(PageStore& store, const char* what, const Fill& fill) {
  const Layout& layout = store.layout();
  const bool split = layout.options.precision == Precision::bf16;
  std::vector<float> block(split ? kBlock : 0);
  const uint32_t bytes = layout.options.weight_bytes() + layout.options.remainder_bytes();
  for_chunks(layout, what, bytes, [&](uint32_t l, uint32_t c, const std::vector<Piece>& pieces) {
    const uint64_t n = layout.chunk(l, c).parameters;
    const PageId w = layout.weight(l, c), o = layout.optimizer(l, c);
    std::byte* weights = store.buffer(w).data();
    std::byte* state = split ? store.buffer(o).data() : nullptr;
    std::memset(weights, 0, n * layout.options.weight_bytes());
    if (split) std::memset(state, 0, n * layout.options.remainder_bytes());
    for (const Piece& piece : pieces) {
      if (!split) {
        fill(piece, piece.tensor_begin,
             std::span(reinterpret_cast<float*>(weights) + piece.chunk_begin, piece.count));
        continue;
      }
      for (uint64_t at = 0; at < piece.count; at += kBlock) {
        const std::span<float> part(block.data(), std::min(kBlock, piece.count - at));
        fill(piece, piece.tensor_begin + at, part);
        auto* hi = reinterpret_cast<uint16_t*>(weights) + piece.chunk_begin + at;
        auto* lo = reinterpret_cast<int16_t*>(state) + piece.chunk_begin + at;
        for (size_t i = 0; i < part.size(); ++i) {
          const SplitMaster master = split_master(part[i]);
          hi[i] = master.weight;
          lo[i] = master.remainder;
        }
      }
    }
    store.store(w);
    if (split) store.store(o, n * layout.options.remainder_bytes());
  });
}

std::vector<const LayerTensor*> all_tensors(const ModelShape& model) {
  std::vector<const LayerTensor*> tensors;
  for (const LayerShape& layer : model.layers) {
    for (const LayerTensor& tensor : layer.tensors) tensors.push_back(&tensor);
  }
  return tensors;
}

/// One array of an optimizer page: remainder, exp_avg or exp_avg_sq.
struct StateArray {
  const char* suffix;
  const char* dtype;
  uint32_t bytes;         ///< per element
  uint32_t bytes_before;  ///< per parameter of the chunk, before this array
};

std::vector<StateArray> state_arrays(const PlanOptions& options, bool moments_zero) {
  std::vector<StateArray> arrays;
  const uint32_t remainder = options.remainder_bytes();
  if (remainder > 0) arrays.push_back({".remainder", "I16", remainder, 0});
  if (!moments_zero) {
    arrays.push_back({".exp_avg", "F32", 4, remainder});
    arrays.push_back({".exp_avg_sq", "F32", 4, remainder + 4});
  }
  return arrays;
}

uint64_t state_bytes(const Layout& layout, const Chunk& chunk, bool moments_zero) {
  return chunk.parameters *
         (moments_zero ? layout.options.remainder_bytes() : layout.options.optimizer_bytes());
}

}  // namespace

void check_model_tensors(const ModelShape& model, const ModelTensors& tensors) {
  for (const LayerTensor* tensor : all_tensors(model)) tensors.require(tensor->name, tensor->shape);
}

void load_weights(PageStore& store, const ModelTensors& tensors) {
  check_model_tensors(store.layout().model, tensors);
  fill_masters(store, "loading weights",
               [&](const Piece& piece, uint64_t begin, std::span<float> out) {
                 tensors.read_floats(piece.tensor->name, begin, out);
               });
}

void initialize_weights(PageStore& store, uint64_t seed) {
  const auto range = static_cast<float>(store.layout().model.config.initializer_range);
  fill_masters(store, "drawing weights",
               [&](const Piece& piece, uint64_t begin, std::span<float> out) {
                 if (!piece.tensor->decay) return std::fill(out.begin(), out.end(), 1.0f);
                 const uint64_t key = mix64(seed) ^ mix64(piece.tensor_index + 1);
                 parallel_blocks(out.size(), 1 << 14, [&](uint64_t first, uint64_t last) {
                   for (uint64_t i = first; i < last; ++i)
                     out[i] = range * random_normal(key, begin + i);
                 });
               });
}

void export_weights(PageStore& store, const std::filesystem::path& directory) {
  const Layout& layout = store.layout();
  const bool split = layout.options.precision == Precision::bf16;
  std::vector<TensorSpec> specs;
  for (const LayerTensor* tensor : all_tensors(layout.model)) {
    specs.push_back({tensor->name, tensor->shape, split ? "BF16" : "F32"});
  }
  ModelTensorsWriter writer(directory, std::move(specs));
  const uint32_t weight_bytes = layout.options.weight_bytes();
  const auto write_chunk = [&](uint32_t l, uint32_t c, const std::vector<Piece>& pieces) {
    const std::span<const std::byte> weights = store.load(layout.weight(l, c));
    for (const Piece& piece : pieces) {
      writer.write(piece.tensor_index, piece.tensor_begin,
                   weights.subspan(piece.chunk_begin * weight_bytes, piece.count * weight_bytes));
    }
  };
  for_chunks(layout, "saving weights", weight_bytes, write_chunk);
  writer.finish();
}

void save_optimizer(PageStore& store, const std::filesystem::path& file, bool moments_zero) {
  const Layout& layout = store.layout();
  const std::vector<StateArray> arrays = state_arrays(layout.options, moments_zero);
  const std::vector<const LayerTensor*> tensors = all_tensors(layout.model);
  std::vector<TensorSpec> specs;  // array by array, so that each is found at index a * tensors + t
  for (const StateArray& array : arrays) {
    for (const LayerTensor* tensor : tensors) {
      specs.push_back({tensor->name + array.suffix, tensor->shape, array.dtype});
    }
  }
  SafetensorsWriter writer(file, std::move(specs), {{"format", "pt"}});
  const auto write_chunk = [&](uint32_t l, uint32_t c, const std::vector<Piece>& pieces) {
    if (arrays.empty()) return;
    const Chunk& chunk = layout.chunk(l, c);
    const auto state = store.load(layout.optimizer(l, c), state_bytes(layout, chunk, moments_zero));
    for (size_t a = 0; a < arrays.size(); ++a) {
      const auto values = state.subspan(arrays[a].bytes_before * chunk.parameters);
      for (const Piece& piece : pieces) {
        writer.write(
            a * tensors.size() + piece.tensor_index, piece.tensor_begin,
            values.subspan(piece.chunk_begin * arrays[a].bytes, piece.count * arrays[a].bytes));
      }
    }
  };
  for_chunks(layout, "saving optimizer state", layout.options.optimizer_bytes(), write_chunk);
  writer.finish();
}

void load_optimizer(PageStore& store, const std::filesystem::path& path, bool moments_zero) {
  const Layout& layout = store.layout();
  const std::vector<StateArray> arrays = state_arrays(layout.options, moments_zero);
  if (arrays.empty()) return;
  const SafetensorsFile file(path);
  const auto entry = [&](const LayerTensor& tensor, const StateArray& array) {
    const SafetensorsFile::Entry* found = file.find(tensor.name + array.suffix);
    if (found == nullptr || found->spec.shape != tensor.shape || found->spec.dtype != array.dtype) {
      fail(ErrorCode::invalid_file,
           "{}: {}{} is missing or has another shape or dtype than this run's; resume with the "
           "model "
           "and offload precision that wrote the checkpoint",
           path.string(), tensor.name, array.suffix);
    }
    return found;
  };
  for (const LayerTensor* tensor : all_tensors(layout.model)) {
    for (const StateArray& array : arrays) entry(*tensor, array);
  }
  const auto read_chunk = [&](uint32_t l, uint32_t c, const std::vector<Piece>& pieces) {
    const Chunk& chunk = layout.chunk(l, c);
    const uint64_t bytes = state_bytes(layout, chunk, moments_zero);
    const std::span<std::byte> state = store.buffer(layout.optimizer(l, c)).first(bytes);
    std::fill(state.begin(), state.end(), std::byte{0});
    for (const StateArray& array : arrays) {
      const auto values = state.subspan(array.bytes_before * chunk.parameters);
      for (const Piece& piece : pieces) {
        file.read_raw(*entry(*piece.tensor, array), piece.tensor_begin,
                      values.subspan(piece.chunk_begin * array.bytes, piece.count * array.bytes));
      }
    }
    store.store(layout.optimizer(l, c), bytes);
  };
  for_chunks(layout, "loading optimizer state", layout.options.optimizer_bytes(), read_chunk);
}

}  // namespace overspill
