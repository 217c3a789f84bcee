// Attention and its gradient as cuDNN's operation graphs.
#pragma once

#include <cstdint>

#include "engine/model/cuda_dnn_graph.h"
#include "engine/model/kernels.h"

namespace overspill::cuda {

/// Ids of tensors in memory and of numbers.
enum DnnAttentionId : int64_t {
  kIdQ = 1,
  kIdK,
  kIdV,
  kIdO,
  kIdLse,
  kIdDO,
  kIdDQ,
  kIdDK,
  kIdDV,
  kIdRowSums,  ///< of o * d_o, float32 [batch, heads, sequence_len]
  kIdSums,     ///< of dq, float32 [batch, heads, sequence_len, head_dim]
  kIdScale,
  kIdOne,
  kIdMasked,  ///< what a masked score becomes
  kIdWindow,
  kIdDocumentEnds  ///< int32 [batch, sequence_len]
};

/// A part of a batch: some sequences and heads of tensors that may hold more.
struct DnnAttentionPart {
  AttentionShape part;
  AttentionShape whole;
  bool windowed;
  bool documents;
};

DnnGraph attention_graph(const DnnLibrary& library, const DnnAttentionPart& part);

/// `deterministic` sums dq in a fixed order, and has no tensor kIdSums.
DnnGraph attention_gradient_graph(const DnnLibrary& library, const DnnAttentionPart& part,
                                  bool deterministic);

}  // namespace overspill::cuda
