// Attention of one shape: by cuDNN on tensor cores where it has plans, else by the portable kernel.
// Used by one thread.
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
  /// On the current GPU. Throws Error(invalid_config) when neither takes the shape.
  explicit AttentionChoice(const AttentionShape& shape);

  uint64_t workspace_bytes() const;
  void set_stream(cudaStream_t stream);

  struct Tensors {
    T *q, *k, *v, *o;
    float* lse;
  };
  struct Gradients {
    T *d_o, *dq, *dk, *dv;
  };
  void forward(const Tensors& tensors, std::byte* workspace) const;
  void backward(const Tensors& tensors, const Gradients& gradients, std::byte* workspace) const;

 private:
  AttentionShape shape_;
  cudaStream_t stream_ = nullptr;
  // Later members refer to earlier ones.
  std::optional<DnnLibrary> library_;
  std::optional<DnnHandle> handle_;
  std::optional<DnnAttention> plans_;
};

}  // namespace overspill::cuda
