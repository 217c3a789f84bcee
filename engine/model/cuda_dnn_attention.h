// Causal attention with grouped heads by cuDNN, on tensor cores, in bf16 with float32 softmax and
// sums: kernels.h's attention and attention_gradient. Plans and their workspace are known before
// the first step. Where cuDNN has no plan, the caller takes the portable kernel. Not thread-safe.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "engine/model/cuda_dnn_graph.h"
#include "engine/model/kernels.h"

namespace overspill::cuda {

struct DnnAttentionOptions {
  uint64_t window = 0;     ///< a token sees itself and the window - 1 before it; 0: all before it
  bool documents = false;  ///< and those of its own document alone
  /// Gradients that are the same bits in every run. Costs workspace: two bytes per query head and
  /// pair of tokens, of the heads that are computed at once.
  bool deterministic = true;
  uint64_t most_workspace_bytes = uint64_t{1} << 30;
};

/// Memory of the GPU, bf16 but for lse: q, o, d_o, dq [batch, sequence_len, heads, head_dim],
/// k, v, dk, dv [batch, sequence_len, kv_heads, head_dim], float32 lse [batch, heads,
/// sequence_len].
struct DnnAttentionInput {
  const void *q, *k, *v;
  /// int32 [batch, sequence_len], with `documents`: the position in its sequence behind the last
  /// token of a token's document.
  const int32_t* document_ends = nullptr;
};
struct DnnAttentionGradient {
  const void *o, *d_o;
  const float* lse;
  void *dq, *dk, *dv;
};

class DnnAttention {
 public:
  /// Nothing when cuDNN has no plan within the workspace: then `refusal` says why.
  static std::optional<DnnAttention> make(const DnnTarget& target, const AttentionShape& shape,
                                          const DnnAttentionOptions& options, std::string& refusal);

  uint64_t forward_workspace_bytes() const { return forward_.workspace_bytes(); }
  uint64_t backward_workspace_bytes() const;

  /// Workspaces are aligned to 256 bytes.
  void forward(const DnnHandle& handle, const DnnAttentionInput& input, void* o, float* lse,
               void* workspace) const;
  void backward(const DnnHandle& handle, const DnnAttentionInput& input,
                const DnnAttentionGradient& gradient, void* workspace) const;

  /// How many times backward's plan runs: on a part of the sequences or of the heads each.
  uint64_t backward_parts() const;

 private:
  bool windowed() const;

  DnnAttention(const AttentionShape& shape, const DnnAttentionOptions& options, DnnPlan forward,
               DnnPlan backward, const AttentionShape& part);

  AttentionShape shape_, part_;  // the whole, and what backward's plan takes at once
  DnnAttentionOptions options_;
  float scale_, window_;
  DnnPlan forward_, backward_;
};

}  // namespace overspill::cuda
