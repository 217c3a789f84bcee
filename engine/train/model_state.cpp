// Walks chunks and the tensors that cross them.
#include "engine/train/model_state.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "engine/base/error.h"
#include "engine/base/parallel.h"
#include "engine/base/random.h"
#include "engine/base/units.h"
#include "engine/train/stage_progress.h"
#include "engine/train/write_together.h"
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
  for (const Chunk& chunk : layout.table.chunks) parameters += chunk.parameters;
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
  for_chunks(layout, what, 4, [&](uint32_t l, uint32_t c, const std::vector<Piece>& pieces) {
    const uint64_t remainder_bytes = layout.state(layout.chunk(l, c)).remainder_bytes();
    const PageId w = layout.weight(l, c), o = layout.optimizer(l, c);
    const std::span<std::byte> weights_page = store.buffer(w);
    std::byte* weights = weights_page.data();
    std::byte* state = remainder_bytes > 0 ? store.buffer(o).data() : nullptr;
    std::memset(weights, 0, weights_page.size());
    if (state != nullptr) std::memset(state, 0, remainder_bytes);
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

std::vector<const LayerTensor*> all_tensors(const ModelShape& model) {
  std::vector<const LayerTensor*> tensors;
  for (const LayerShape& layer : model.layers) {
    for (const LayerTensor& tensor : layer.tensors) tensors.push_back(&tensor);
  }
  return tensors;
}

/// One array of an optimizer page, as far as it belongs to one tensor.
struct StateArray {
  const char* suffix;
  const char* dtype;
  uint64_t StateLayout::*offset;
  uint64_t bytes;           ///< per element
  uint64_t parameters = 1;  ///< per element
  bool exact = false;       ///< indexed from the run's exact_begin
};

/// The arrays that hold a tensor's state, in the order of StateLayout.
std::vector<StateArray> state_arrays(const OptimizerSettings& rule, const LayerTensor& tensor,
                                     bool moments_zero) {
  std::vector<StateArray> arrays;
  if (rule.master == MasterFormat::split) {
    arrays.push_back({".remainder", "I16", &StateLayout::remainder, 2});
  }
  if (moments_zero) return arrays;
  if (has_factored_moments(rule, tensor)) return arrays;
  const bool sgd = rule.kind == OptimizerKind::sgd;
  if (sgd && rule.momentum == 0) return arrays;
  if (rule.kind == OptimizerKind::adafactor) {
    arrays.push_back({".exp_avg_sq", "F32", &StateLayout::exact_second, 4, 1, true});
    return arrays;
  }
  const bool second = rule.kind == OptimizerKind::adamw;
  const char* first_name = sgd ? ".momentum_buffer" : ".exp_avg";
  const auto add = [&](const char* dtype, uint64_t bytes, uint64_t StateLayout::*first_offset,
                       uint64_t StateLayout::*second_offset, bool exact) {
    arrays.push_back({first_name, dtype, first_offset, bytes, 1, exact});
    if (second) arrays.push_back({".exp_avg_sq", dtype, second_offset, bytes, 1, exact});
  };
  if (has_exact_moments(rule, tensor)) {
    add("F32", 4, &StateLayout::exact_first, &StateLayout::exact_second, true);
    return arrays;
  }
  switch (rule.state) {
    case StateFormat::float32:
      add("F32", 4, &StateLayout::first, &StateLayout::second, false);
      break;
    case StateFormat::bfloat16:
      add("BF16", 2, &StateLayout::first, &StateLayout::second, false);
      break;
    case StateFormat::int8:
      add("U8", 1, &StateLayout::first, &StateLayout::second, false);
      arrays.push_back({sgd ? ".momentum_buffer_scale" : ".exp_avg_scale", "F32",
                        &StateLayout::first_scales, 4, kStateBlock});
      if (second) {
        arrays.push_back({".exp_avg_sq_scale", "F32", &StateLayout::second_scales, 4, kStateBlock});
      }
      break;
  }
  return arrays;
}

std::vector<uint64_t> array_shape(const StateArray& array, const LayerTensor& tensor) {
  if (array.parameters == 1) return tensor.shape;
  return {ceil_div(tensor.elements, array.parameters)};
}

/// A part of a tensor's state in a chunk's page and in the tensor's array.
struct StatePart {
  uint64_t first;  ///< element of the tensor's array
  uint64_t at;     ///< byte in the page
  uint64_t bytes;
};
StatePart state_part(const Layout& layout, const Chunk& chunk, const Piece& piece,
                     const StateArray& array) {
  uint64_t begin = piece.chunk_begin;
  if (array.exact) {
    const auto runs = layout.runs(chunk);
    begin = std::ranges::find(runs, piece.chunk_begin, &UpdateRun::begin)->exact_begin;
  }
  return {.first = piece.tensor_begin / array.parameters,
          .at = layout.state(chunk).*array.offset + begin / array.parameters * array.bytes,
          .bytes = ceil_div(piece.count, array.parameters) * array.bytes};
}

constexpr const char* kRowSuffix = ".exp_avg_sq_row";
constexpr const char* kColumnSuffix = ".exp_avg_sq_col";

/// Calls visit(name, averages) for each array of the factored moments.
template <class Visit>
void for_factored_arrays(const PageStore& store, const Visit& visit) {
  const Layout& layout = store.layout();
  float* averages = store.factored_moments().averages;
  for (uint32_t l = 0; l < layout.model.layers.size(); ++l) {
    for (const FactoredMatrix& m : layout.matrices(l)) {
      const std::string& name =
          std::ranges::find(layout.model.layers[l].tensors, m.offset, &LayerTensor::offset)->name;
      visit(name + kRowSuffix, std::span(averages + m.first, m.rows));
      visit(name + kColumnSuffix, std::span(averages + m.column_first(), m.columns));
    }
  }
}

/// What of a chunk's page is read and written: all of it, or the part before the moments.
uint64_t state_bytes(const Layout& layout, PageId page, const Chunk& chunk, bool moments_zero) {
  return moments_zero ? layout.state(chunk).remainder_bytes() : layout.page(page).bytes;
}

/// Copies of the state take turns, so that all ranks write.
bool is_writer(const Layout& layout, const Chunk& chunk) {
  const PlanOptions& o = layout.options;
  return layout.owns(chunk) && (chunk.begin / layout.chunk_parameters) % o.replicas == o.replica;
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
  const auto write_chunk = [&](uint32_t l, uint32_t c, const std::vector<Piece>& pieces) {
    if (!is_writer(layout, layout.chunk(l, c))) return;
    const std::span<const std::byte> weights = store.load(layout.weight(l, c));
    for (const Piece& piece : pieces) {
      writer.write(piece.tensor_index, piece.tensor_begin,
                   weights.subspan(piece.chunk_begin * weight_bytes, piece.count * weight_bytes));
    }
  };
  for_chunks(layout, "saving weights", weight_bytes, write_chunk);
  complete_together(ranks, writer);
}

void save_optimizer(PageStore& store, const std::filesystem::path& file, bool moments_zero,
                    const Ranks& ranks) {
  const Layout& layout = store.layout();
  const OptimizerSettings rule = layout.options.update_rule();
  std::vector<TensorSpec> specs;
  std::vector<size_t> first_spec;  // of each tensor
  for (const LayerTensor* tensor : all_tensors(layout.model)) {
    first_spec.push_back(specs.size());
    if (!tensor->trainable) continue;
    for (const StateArray& array : state_arrays(rule, *tensor, moments_zero)) {
      specs.push_back({tensor->name + array.suffix, array_shape(array, *tensor), array.dtype});
    }
  }
  size_t factored_spec = specs.size();
  if (!moments_zero) {
    for_factored_arrays(store, [&](const std::string& name, std::span<const float> averages) {
      specs.push_back({name, {averages.size()}, "F32"});
    });
  }
  const auto open = [&](WriterRole role) {
    return SafetensorsWriter(file, std::move(specs), {{"format", "pt"}}, role);
  };
  auto writer = open_together(ranks, open);
  const auto write_chunk = [&](uint32_t l, uint32_t c, const std::vector<Piece>& pieces) {
    const Chunk& chunk = layout.chunk(l, c);
    const PageId page = layout.optimizer(l, c);
    const uint64_t bytes = state_bytes(layout, page, chunk, moments_zero);
    if (bytes == 0 || !is_writer(layout, chunk)) return;
    const auto state = store.load(page, bytes);
    for (const Piece& piece : pieces) {
      if (!piece.tensor->trainable) continue;
      size_t spec = first_spec[piece.tensor_index];
      for (const StateArray& array : state_arrays(rule, *piece.tensor, moments_zero)) {
        const StatePart part = state_part(layout, chunk, piece, array);
        writer.write(spec++, part.first, state.subspan(part.at, part.bytes));
      }
    }
  };
  for_chunks(layout, "saving optimizer state", 1, write_chunk);
  if (!moments_zero && ranks.first()) {  // every rank has them all
    for_factored_arrays(store, [&](const std::string&, std::span<const float> averages) {
      writer.write(factored_spec++, 0, std::as_bytes(averages));
    });
  }
  complete_together(ranks, writer);
}

void load_optimizer(PageStore& store, const std::filesystem::path& path, bool moments_zero) {
  const Layout& layout = store.layout();
  const OptimizerSettings rule = layout.options.update_rule();
  const SafetensorsFile file(path);
  const auto named_entry = [&](const std::string& name, const std::vector<uint64_t>& shape,
                               const std::string& dtype) {
    const SafetensorsFile::Entry* found = file.find(name);
    if (found == nullptr || found->spec.shape != shape || found->spec.dtype != dtype) {
      fail(ErrorCode::invalid_file,
           "{}: {} is missing or has another shape or dtype than this run's; resume with the "
           "model, precision, optimizer, optimizer_state and unfrozen_parameters that wrote the "
           "checkpoint",
           path.string(), name);
    }
    return found;
  };
  const auto entry = [&](const LayerTensor& tensor, const StateArray& array) {
    return named_entry(tensor.name + array.suffix, array_shape(array, tensor), array.dtype);
  };
  const auto refuse_frozen = [&](const std::string& name) {
    if (file.find(name) == nullptr) return;
    // Without its remainder, a master would silently become its bf16 weight.
    fail(ErrorCode::invalid_file,
         "{}: {} is the state of a tensor that this run freezes; resume with the "
         "unfrozen_parameters that wrote the checkpoint, or start from it as base_model",
         path.string(), name);
  };
  for (const LayerTensor* tensor : all_tensors(layout.model)) {
    for (const StateArray& array : state_arrays(rule, *tensor, moments_zero)) {
      if (tensor->trainable) {
        entry(*tensor, array);
      } else {
        refuse_frozen(tensor->name + array.suffix);
      }
    }
    if (!tensor->trainable && has_factored_moments(rule, *tensor)) {
      refuse_frozen(tensor->name + kRowSuffix);
    }
  }
  if (!moments_zero) {
    for_factored_arrays(store, [&](const std::string& name, std::span<float> averages) {
      const auto* found = named_entry(name, {averages.size()}, "F32");
      file.read_raw(*found, 0, std::as_writable_bytes(averages));
    });
  }
  const auto read_chunk = [&](uint32_t l, uint32_t c, const std::vector<Piece>& pieces) {
    const Chunk& chunk = layout.chunk(l, c);
    const PageId page = layout.optimizer(l, c);
    const uint64_t bytes = state_bytes(layout, page, chunk, moments_zero);
    if (bytes == 0) return;
    const std::span<std::byte> state = store.buffer(page).first(bytes);
    std::fill(state.begin(), state.end(), std::byte{0});
    for (const Piece& piece : pieces) {
      if (!piece.tensor->trainable) continue;
      for (const StateArray& array : state_arrays(rule, *piece.tensor, moments_zero)) {
        const StatePart part = state_part(layout, chunk, piece, array);
        file.read_raw(*entry(*piece.tensor, array), part.first, state.subspan(part.at, part.bytes));
      }
    }
    store.store(page, bytes);
  };
  for_chunks(layout, "loading optimizer state", 1, read_chunk);
}

}  // namespace overspill
