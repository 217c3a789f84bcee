// Attention of one shape: by cuDNN on tensor cores where it has plans, else by the portable kernel;
// which of them is decided for batches with documents and for those without. Used by one thread.
#pragma once

#include <optional>
#include <string>

#include "engine/model/cuda_dnn_attention.h"
#include "engine/model/kernels.h"

namespace overspill::cuda {

/// T: float or __nv_bfloat16. Tensors are [batch, sequence_len, heads, head_dim]; lse has a float32
/// per token and head, in an order of the choice's own.
template <class T>
class AttentionChoice {
 public:
  /// On the current GPU; `documents`: batches may have them. Throws Error(invalid_config) when
  /// neither takes the shape.
  AttentionChoice(const AttentionShape& shape, bool documents);

  uint64_t workspace_bytes() const;
  void set_stream(cudaStream_t stream);

  struct Tensors {
    T *q, *k, *v, *o;
    float* lse;
    /// [batch, sequence_len], or null: the same for forward and backward.
    const int32_t *document_begins, *document_ends;
  };
  struct Gradients {
    T *d_o, *dq, *dk, *dv;
  };
  void forward(const Tensors& tensors, std::byte* workspace) const;
  void backward(const Tensors& tensors, const Gradients& gradients, std::byte* workspace) const;

 private:
  const std::optional<DnnAttention>& plans(const Tensors& tensors) const;

  AttentionShape shape_;
  bool documents_;
  cudaStream_t stream_ = nullptr;
  // Later members refer to earlier ones.
  std::optional<DnnLibrary> library_;
  std::optional<DnnHandle> handle_;
  std::optional<DnnAttention> plans_, document_plans_;
};

}  // namespace overspill::cuda
