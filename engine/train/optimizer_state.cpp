// Optimizer state: its arrays by tensor, written and read.
#include <algorithm>
#include <vector>

#include "engine/base/error.h"
#include "engine/base/units.h"
#include "engine/train/model_state.h"
#include "engine/train/state_chunks.h"
#include "engine/train/write_together.h"

namespace overspill {
namespace {

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
StatePart state_part(const Layout& layout, const Chunk& chunk, const ChunkPiece& piece,
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

/// A file of save_optimizer's, of a model with this layout.
class OptimizerFile {
 public:
  OptimizerFile(const Layout& layout, const std::filesystem::path& path)
      : layout_(layout), rule_(layout.options.update_rule()), file_(path) {}

  const SafetensorsFile& file() const { return file_; }
  const OptimizerSettings& rule() const { return rule_; }

  const SafetensorsFile::Entry& entry(const std::string& name, const std::vector<uint64_t>& shape,
                                      const std::string& dtype) const {
    const SafetensorsFile::Entry* found = file_.find(name);
    if (found == nullptr || found->spec.shape != shape || found->spec.dtype != dtype) {
      fail(ErrorCode::invalid_file,
           "{}: {} is missing or has another shape or dtype than this run's; resume with the "
           "model, precision, optimizer, optimizer_state and unfrozen_parameters that wrote the "
           "checkpoint",
           file_.path().string(), name);
    }
    return *found;
  }
  const SafetensorsFile::Entry& entry(const LayerTensor& tensor, const StateArray& array) const {
    return entry(tensor.name + array.suffix, array_shape(array, tensor), array.dtype);
  }

  void check(const PageStore& store, bool moments_zero) const {
    for (const LayerTensor* tensor : all_tensors(layout_.model)) {
      for (const StateArray& array : state_arrays(rule_, *tensor, moments_zero)) {
        if (tensor->trainable) {
          entry(*tensor, array);
        } else {
          refuse_frozen(tensor->name + array.suffix);
        }
      }
      if (!tensor->trainable && has_factored_moments(rule_, *tensor)) {
        refuse_frozen(tensor->name + kRowSuffix);
      }
    }
    if (moments_zero) return;
    for_factored_arrays(store, [&](const std::string& name, std::span<const float> averages) {
      entry(name, {averages.size()}, "F32");
    });
  }

 private:
  void refuse_frozen(const std::string& name) const {
    if (file_.find(name) == nullptr) return;
    // Without its remainder, a master would silently become its bf16 weight.
    fail(ErrorCode::invalid_file,
         "{}: {} is the state of a tensor that this run freezes; resume with the "
         "unfrozen_parameters that wrote the checkpoint, or start from it as base_model",
         file_.path().string(), name);
  }

  const Layout& layout_;
  const OptimizerSettings rule_;
  const SafetensorsFile file_;
};

}  // namespace

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
  const auto write_chunk = [&](uint32_t l, uint32_t c, const std::vector<ChunkPiece>& pieces) {
    const Chunk& chunk = layout.chunk(l, c);
    const PageId page = layout.optimizer(l, c);
    const uint64_t bytes = state_bytes(layout, page, chunk, moments_zero);
    if (bytes == 0 || !is_writer(layout, chunk)) return;
    const auto state = store.load(page, bytes);
    for (const ChunkPiece& piece : pieces) {
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

void check_optimizer(const PageStore& store, const std::filesystem::path& path, bool moments_zero) {
  OptimizerFile(store.layout(), path).check(store, moments_zero);
}

void load_optimizer(PageStore& store, const std::filesystem::path& path, bool moments_zero) {
  const Layout& layout = store.layout();
  const OptimizerFile state_file(layout, path);
  state_file.check(store, moments_zero);
  if (!moments_zero) {
    for_factored_arrays(store, [&](const std::string& name, std::span<float> averages) {
      const auto& found = state_file.entry(name, {averages.size()}, "F32");
      state_file.file().read_raw(found, 0, std::as_writable_bytes(averages));
    });
  }
  const auto read_chunk = [&](uint32_t l, uint32_t c, const std::vector<ChunkPiece>& pieces) {
    const Chunk& chunk = layout.chunk(l, c);
    const PageId page = layout.optimizer(l, c);
    const uint64_t bytes = state_bytes(layout, page, chunk, moments_zero);
    if (bytes == 0) return;
    const std::span<std::byte> state = store.buffer(page).first(bytes);
    std::fill(state.begin(), state.end(), std::byte{0});
    for (const ChunkPiece& piece : pieces) {
      if (!piece.tensor->trainable) continue;
      for (const StateArray& array : state_arrays(state_file.rule(), *piece.tensor, moments_zero)) {
        const StatePart part = state_part(layout, chunk, piece, array);
        state_file.file().read_raw(state_file.entry(*piece.tensor, array), part.first,
                                   state.subspan(part.at, part.bytes));
      }
    }
    store.store(page, bytes);
  };
  for_chunks(layout, "loading optimizer state", 1, read_chunk);
}

}  // namespace overspill
