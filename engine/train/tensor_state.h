// One tensor between its pages and memory. Single-threaded use between steps.
#pragma once

#include <span>

#include "engine/collective/ranks.h"
#include "engine/run/page_store.h"

namespace overspill {

/// Sets the float32 master as far as this rank keeps it; bf16 weights of frozen tensors are
/// rounded.
void write_tensor(PageStore& store, uint32_t layer, const LayerTensor& tensor,
                  std::span<const float> values);

/// The tensor as float32: the masters, or with `as_computed` the weights that compute uses. Ranks
/// that share weights put their parts together; all of them call it at once.
void read_tensor(PageStore& store, uint32_t layer, const LayerTensor& tensor, bool as_computed,
                 const Ranks& ranks, std::span<float> values);

}  // namespace overspill
