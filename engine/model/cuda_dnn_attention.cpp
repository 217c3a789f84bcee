// Backward's workspace: row sums, sums of dq when their order is free, then the plan's own.
#include "engine/model/cuda_dnn_attention.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "engine/base/error.h"
#include "engine/model/cuda_dnn_attention_graph.h"

namespace overspill::cuda {
namespace {

constexpr uint64_t kAlignment = 256;
constexpr uint64_t kBf16Bytes = 2;
// Its exponential is 0 beside any score. Finite, and far from overflow: kernels scale it, and
// subtract it from itself where a tile has no other scores.
constexpr float kMasked = -0x1p30f;

uint64_t aligned(uint64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

uint64_t row_sums_bytes(const AttentionShape& part) {
  return aligned(part.batch * part.heads * part.sequence_len * sizeof(float));
}

uint64_t sums_bytes(const AttentionShape& part, bool deterministic) {
  if (deterministic) return 0;
  return aligned(part.batch * part.heads * part.sequence_len * part.head_dim * sizeof(float));
}

/// What backward is known to need before cuDNN is asked, which takes a while.
uint64_t least_bytes(const AttentionShape& part, bool deterministic) {
  const uint64_t own = row_sums_bytes(part) + sums_bytes(part, deterministic);
  if (!deterministic) return own;
  return own + part.batch * part.heads * part.sequence_len * part.sequence_len * kBf16Bytes;
}

/// From the whole down to one group of heads of one sequence.
std::vector<AttentionShape> parts_of(const AttentionShape& whole) {
  // A part's lse must be aligned to 16 bytes.
  if (whole.sequence_len % 4 != 0) return {whole};
  std::vector<AttentionShape> parts;
  for (uint64_t batch = whole.batch; batch > 0; --batch) {
    if (whole.batch % batch != 0) continue;
    parts.push_back(whole);
    parts.back().batch = batch;
  }
  const uint32_t group = whole.heads / whole.kv_heads;
  for (uint32_t heads = whole.kv_heads - 1; heads > 0; --heads) {
    if (whole.kv_heads % heads != 0) continue;
    parts.push_back({1, whole.sequence_len, heads * group, heads, whole.head_dim});
  }
  return parts;
}

bool sound(const AttentionShape& shape, std::string& refusal) {
  if (shape.batch == 0 || shape.sequence_len == 0 || shape.kv_heads == 0 ||
      shape.heads % shape.kv_heads != 0) {
    refusal = fmt::format("{} heads over {} key heads, {} sequences of {} tokens are no attention",
                          shape.heads, shape.kv_heads, shape.batch, shape.sequence_len);
    return false;
  }
  if (shape.head_dim % 8 == 0) return true;
  refusal = fmt::format("heads of {} values are not aligned to 16 bytes", shape.head_dim);
  return false;
}

bool is_aligned(const void* memory, uint64_t bytes) {
  return reinterpret_cast<uintptr_t>(memory) % bytes == 0;
}

const void* bf16_at(const void* memory, uint64_t index) {
  CHECK(is_aligned(memory, 16));
  return static_cast<const std::byte*>(memory) + index * kBf16Bytes;
}

}  // namespace

std::optional<DnnAttention> DnnAttention::make(const DnnTarget& target, const AttentionShape& shape,
                                               const DnnAttentionOptions& options,
                                               std::string& refusal) {
  if (!sound(shape, refusal)) return std::nullopt;
  const DnnLibrary& library = target.library();
  const bool windowed = options.window != 0 && options.window < shape.sequence_len;
  std::optional<DnnPlan> forward =
      DnnPlan::make(target, attention_graph(library, {shape, shape, windowed, options.documents}),
                    options.most_workspace_bytes, refusal);
  if (!forward) return std::nullopt;
  refusal = fmt::format("backward needs more than the {} bytes of workspace that it may use",
                        options.most_workspace_bytes);
  for (const AttentionShape& part : parts_of(shape)) {
    const bool deterministic = options.deterministic;
    if (least_bytes(part, deterministic) > options.most_workspace_bytes) continue;
    const uint64_t own = row_sums_bytes(part) + sums_bytes(part, deterministic);
    std::optional<DnnPlan> backward =
        DnnPlan::make(target,
                      attention_gradient_graph(library, {part, shape, windowed, options.documents},
                                               deterministic),
                      options.most_workspace_bytes - own, refusal);
    if (!backward) continue;
    return DnnAttention(shape, options, std::move(*forward), std::move(*backward), part);
  }
  return std::nullopt;
}

DnnAttention::DnnAttention(const AttentionShape& shape, const DnnAttentionOptions& options,
                           DnnPlan forward, DnnPlan backward, const AttentionShape& part)
    : shape_(shape),
      part_(part),
      options_(options),
      scale_(1.0f / std::sqrt(static_cast<float>(shape.head_dim))),
      window_(static_cast<float>(options.window)),
      forward_(std::move(forward)),
      backward_(std::move(backward)) {}

uint64_t DnnAttention::backward_workspace_bytes() const {
  return row_sums_bytes(part_) + sums_bytes(part_, options_.deterministic) +
         backward_.workspace_bytes();
}

bool DnnAttention::windowed() const {
  return options_.window != 0 && options_.window < shape_.sequence_len;
}

uint64_t DnnAttention::backward_parts() const {
  return shape_.batch / part_.batch * (shape_.kv_heads / part_.kv_heads);
}

void DnnAttention::forward(const DnnHandle& handle, const DnnAttentionInput& input, void* o,
                           float* lse, void* workspace) const {
  CHECK(is_aligned(workspace, kAlignment));
  std::vector<DnnArgument> arguments = {{kIdQ, bf16_at(input.q, 0)},
                                        {kIdK, bf16_at(input.k, 0)},
                                        {kIdV, bf16_at(input.v, 0)},
                                        {kIdO, bf16_at(o, 0)},
                                        {kIdLse, lse},
                                        {kIdScale, &scale_},
                                        {kIdMasked, &kMasked}};
  if (windowed()) arguments.push_back({kIdWindow, &window_});
  if (options_.documents) {
    CHECK(is_aligned(input.document_ends, 16));
    arguments.push_back({kIdDocumentEnds, input.document_ends});
  }
  forward_.execute(handle, arguments, workspace);
}

void DnnAttention::backward(const DnnHandle& handle, const DnnAttentionInput& input,
                            const DnnAttentionGradient& gradient, void* workspace) const {
  CHECK(is_aligned(workspace, kAlignment));
  const float one = 1.0f;
  std::byte* const row_sums = static_cast<std::byte*>(workspace);
  std::byte* const sums = row_sums + row_sums_bytes(part_);
  std::byte* const rest = sums + sums_bytes(part_, options_.deterministic);
  const uint64_t s = shape_.sequence_len, d = shape_.head_dim;
  for (uint64_t batch = 0; batch < shape_.batch; batch += part_.batch) {
    for (uint64_t kv = 0; kv < shape_.kv_heads; kv += part_.kv_heads) {
      const uint64_t head = kv * (shape_.heads / shape_.kv_heads);
      const uint64_t q_at = (batch * s * shape_.heads + head) * d;
      const uint64_t k_at = (batch * s * shape_.kv_heads + kv) * d;
      std::vector<DnnArgument> arguments = {
          {kIdQ, bf16_at(input.q, q_at)},
          {kIdK, bf16_at(input.k, k_at)},
          {kIdV, bf16_at(input.v, k_at)},
          {kIdO, bf16_at(gradient.o, q_at)},
          {kIdLse, gradient.lse + (batch * shape_.heads + head) * s},
          {kIdDO, bf16_at(gradient.d_o, q_at)},
          {kIdDQ, bf16_at(gradient.dq, q_at)},
          {kIdDK, bf16_at(gradient.dk, k_at)},
          {kIdDV, bf16_at(gradient.dv, k_at)},
          {kIdRowSums, row_sums},
          {kIdScale, &scale_},
          {kIdOne, &one},
          {kIdMasked, &kMasked}};
      if (!options_.deterministic) arguments.push_back({kIdSums, sums});
      if (windowed()) arguments.push_back({kIdWindow, &window_});
      if (options_.documents) {
        arguments.push_back({kIdDocumentEnds, input.document_ends + batch * s});
      }
      backward_.execute(handle, arguments, rest);
    }
  }
}

}  // namespace overspill::cuda
