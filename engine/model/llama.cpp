// Composition of kernels into the Llama family's layers.
#include "engine/model/llama.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "engine/base/error.h"
#include "engine/base/parallel.h"
#include "engine/base/units.h"

namespace overspill {
namespace {

constexpr uint64_t kLossChunkBytes = uint64_t{16} << 20;
constexpr uint64_t kMaxLossRows = 256;

/// Hands out 64-byte aligned float buffers from one block of memory; with null memory it measures.
class Bump {
 public:
  explicit Bump(std::byte* memory) : memory_(memory) {}
  float* floats(uint64_t count) {
    float* result = memory_ == nullptr ? nullptr : reinterpret_cast<float*>(memory_ + used_);
    used_ += round_up(count * sizeof(float), 64);
    return result;
  }
  uint64_t used() const { return used_; }

 private:
  std::byte* memory_;
  uint64_t used_ = 0;
};

}  // namespace

struct Llama::Block {
  float *norm1, *rstd1, *q, *k, *v, *attention, *lse, *middle, *norm2, *rstd2, *gate, *up, *act;
  float *d_attention, *dq, *dk, *dv, *d_norm;  // backward only
  const int32_t* document_begins;
  uint64_t bytes;
};

Llama::Block Llama::carve(bool backward, const int32_t* document_begins) const {
  const ModelConfig& c = model_.config;
  const uint64_t n = batch_.tokens(), d = c.hidden_size, f = c.intermediate_size;
  const uint64_t qd = uint64_t{c.num_attention_heads} * c.head_dim;
  const uint64_t kd = uint64_t{c.num_key_value_heads} * c.head_dim;
  Bump bump(buffers_);
  Block b{};
  b.document_begins = document_begins;
  b.norm1 = bump.floats(n * d);
  b.rstd1 = bump.floats(n);
  b.q = bump.floats(n * qd);
  b.k = bump.floats(n * kd);
  b.v = bump.floats(n * kd);
  b.attention = bump.floats(n * qd);
  b.lse = bump.floats(n * c.num_attention_heads);
  b.middle = bump.floats(n * d);
  b.norm2 = bump.floats(n * d);
  b.rstd2 = bump.floats(n);
  b.gate = bump.floats(n * f);
  b.up = bump.floats(n * f);
  b.act = bump.floats(n * f);
  if (backward) {
    b.d_attention = bump.floats(n * qd);
    b.dq = bump.floats(n * qd);
    b.dk = bump.floats(n * kd);
    b.dv = bump.floats(n * kd);
    b.d_norm = bump.floats(n * d);
  }
  b.bytes = bump.used();
  return b;
}

Llama::Llama(const ModelShape& model, DType weight_type, const BatchShape& batch,
             const Kernels& kernels)
    : model_(model), type_(weight_type), batch_(batch), kernels_(kernels) {
  const ModelConfig& c = model.config;
  table_bytes_ = round_up(batch.sequence_len * c.head_dim * sizeof(float), 64);
  Bump head(nullptr);
  head.floats(loss_rows() * c.vocab_size);
  head.floats(2 * loss_rows() * c.hidden_size);
  head.floats(2 * loss_rows());
  buffer_bytes_ = std::max(carve(true, nullptr).bytes, head.used() + 256);
}

uint64_t Llama::scratch_bytes() const { return scratch_bytes(parallel_threads()); }

uint64_t Llama::scratch_bytes(uint32_t threads) const {
  return round_up(table_bytes_ + threads * kThreadScratchBytes + buffer_bytes_, 4096);
}

uint64_t Llama::loss_rows() const {
  const uint64_t fitting = kLossChunkBytes / sizeof(float) / model_.config.vocab_size / 16 * 16;
  return std::min(batch_.tokens(), std::clamp<uint64_t>(fitting, 16, kMaxLossRows));
}

void Llama::set_scratch(std::byte* memory) {
  CHECK(reinterpret_cast<uintptr_t>(memory) % 64 == 0);
  table_ = reinterpret_cast<float*>(memory);
  thread_scratch_.memory = memory + table_bytes_;
  buffers_ = thread_scratch_.memory + parallel_threads() * kThreadScratchBytes;
  rotary_table(model_.config, batch_.sequence_len, table_);
}

WeightView Llama::view(const void* weights, const LayerTensor& tensor) const {
  const auto* bytes = static_cast<const std::byte*>(weights);
  return {bytes + tensor.offset * dtype_bytes(type_), type_};
}

LinearShape Llama::linear_shape(const LayerTensor& tensor) const {
  return {batch_.tokens(), tensor.shape[1], tensor.shape[0]};
}

void Llama::zero_untrained(const LayerShape& shape, float* sums) const {
  for (const LayerShape::Range& gap : shape.untrained()) {
    parallel_blocks(gap.end - gap.begin, 1 << 16, [&](uint64_t begin, uint64_t end) {
      std::fill(sums + gap.begin + begin, sums + gap.begin + end, 0.0f);
    });
  }
}

void Llama::weight_gradient(const LayerTensor& tensor, const float* dout, const float* in,
                            float* sums, bool first) const {
  if (!tensor.trainable) return;
  kernels_.linear_weight_gradient(linear_shape(tensor), dout, in, sums + tensor.offset, !first);
}

void Llama::norm_gradient(const LayerTensor& tensor, const void* weights, const float* x,
                          const float* rstd, const float* dy, float* dx, float* sums,
                          bool first) const {
  kernels_.rms_norm_gradient(x, view(weights, tensor), rstd, dy, dx,
                             tensor.trainable ? sums + tensor.offset : nullptr, !first,
                             batch_.tokens(), model_.config.hidden_size);
}

void Llama::embed(const void* weights, const int32_t* tokens, void* y) const {
  kernels_.embed(tokens, view(weights, model_.layers[0].tensors[0]), static_cast<float*>(y),
                 batch_.tokens(), model_.config.hidden_size);
}

void Llama::embed_backward(const int32_t* tokens, const void* dy, float* sums, bool first) const {
  if (first) {
    parallel_blocks(model_.layers[0].padded, 1 << 16, [&](uint64_t begin, uint64_t end) {
      std::fill(sums + begin, sums + end, 0.0f);
    });
  }
  kernels_.embed_gradient(tokens, static_cast<const float*>(dy), sums, batch_.tokens(),
                          model_.config.hidden_size);
}

void Llama::attention_forward(const LayerShape& shape, const void* weights, const float* x,
                              Block& b) const {
  const ModelConfig& c = model_.config;
  const auto& t = shape.tensors;
  const uint64_t n = batch_.tokens(), d = c.hidden_size;
  kernels_.rms_norm(x, view(weights, t[kInputNorm]), static_cast<float>(c.rms_norm_eps), b.norm1,
                    b.rstd1, n, d);
  const auto project = [&](BlockTensor which, float* out) {
    kernels_.linear(thread_scratch_, linear_shape(t[which]), b.norm1, view(weights, t[which]), out,
                    false);
  };
  project(kQuery, b.q);
  project(kKey, b.k);
  project(kValue, b.v);
  kernels_.rotate(b.q, table_, batch_.sequences, batch_.sequence_len, c.num_attention_heads,
                  c.head_dim, false);
  kernels_.rotate(b.k, table_, batch_.sequences, batch_.sequence_len, c.num_key_value_heads,
                  c.head_dim, false);
  const AttentionShape s{batch_.sequences, batch_.sequence_len, c.num_attention_heads,
                         c.num_key_value_heads, c.head_dim};
  kernels_.attention(thread_scratch_, s, b.document_begins, b.q, b.k, b.v, b.attention, b.lse);
  std::copy_n(x, n * d, b.middle);
  kernels_.linear(thread_scratch_, linear_shape(t[kAttentionOut]), b.attention,
                  view(weights, t[kAttentionOut]), b.middle, true);
}

void Llama::mlp_forward(const LayerShape& shape, const void* weights, Block& b) const {
  const auto& t = shape.tensors;
  kernels_.rms_norm(b.middle, view(weights, t[kPostNorm]),
                    static_cast<float>(model_.config.rms_norm_eps), b.norm2, b.rstd2,
                    batch_.tokens(), model_.config.hidden_size);
  kernels_.linear(thread_scratch_, linear_shape(t[kGate]), b.norm2, view(weights, t[kGate]), b.gate,
                  false);
  kernels_.linear(thread_scratch_, linear_shape(t[kUp]), b.norm2, view(weights, t[kUp]), b.up,
                  false);
  kernels_.swiglu(b.gate, b.up, b.act, batch_.tokens() * model_.config.intermediate_size);
}

void Llama::block(uint32_t layer, const void* weights, const int32_t* document_begins,
                  const void* x, void* y) const {
  const LayerShape& shape = model_.layers[layer];
  Block b = carve(false, document_begins);
  attention_forward(shape, weights, static_cast<const float*>(x), b);
  mlp_forward(shape, weights, b);
  float* const out = static_cast<float*>(y);
  std::copy_n(b.middle, batch_.tokens() * model_.config.hidden_size, out);
  kernels_.linear(thread_scratch_, linear_shape(shape.tensors[kDown]), b.act,
                  view(weights, shape.tensors[kDown]), out, true);
}

void Llama::mlp_backward(const LayerShape& shape, const void* weights, float* dy, float* sums,
                         bool first, Block& b) const {
  const auto& t = shape.tensors;
  const auto input_gradient = [&](BlockTensor which, const float* dout, float* din, bool add) {
    kernels_.linear_input_gradient(thread_scratch_, linear_shape(t[which]), dout,
                                   view(weights, t[which]), din, add);
  };
  weight_gradient(t[kDown], dy, b.act, sums, first);
  input_gradient(kDown, dy, b.act, false);
  kernels_.swiglu_gradient(b.gate, b.up, b.act, batch_.tokens() * model_.config.intermediate_size);
  weight_gradient(t[kGate], b.gate, b.norm2, sums, first);
  weight_gradient(t[kUp], b.up, b.norm2, sums, first);
  input_gradient(kGate, b.gate, b.d_norm, false);
  input_gradient(kUp, b.up, b.d_norm, true);
  norm_gradient(t[kPostNorm], weights, b.middle, b.rstd2, b.d_norm, dy, sums, first);
}

void Llama::attention_backward(const LayerShape& shape, const void* weights, const float* x,
                               float* dy, float* sums, bool first, Block& b) const {
  const ModelConfig& c = model_.config;
  const auto& t = shape.tensors;
  const auto input_gradient = [&](BlockTensor which, const float* dout, float* din, bool add) {
    kernels_.linear_input_gradient(thread_scratch_, linear_shape(t[which]), dout,
                                   view(weights, t[which]), din, add);
  };
  weight_gradient(t[kAttentionOut], dy, b.attention, sums, first);
  input_gradient(kAttentionOut, dy, b.d_attention, false);
  const AttentionShape s{batch_.sequences, batch_.sequence_len, c.num_attention_heads,
                         c.num_key_value_heads, c.head_dim};
  kernels_.attention_gradient(thread_scratch_, s, b.document_begins, b.q, b.k, b.v, b.attention,
                              b.lse, b.d_attention, b.dq, b.dk, b.dv);
  kernels_.rotate(b.dq, table_, batch_.sequences, batch_.sequence_len, c.num_attention_heads,
                  c.head_dim, true);
  kernels_.rotate(b.dk, table_, batch_.sequences, batch_.sequence_len, c.num_key_value_heads,
                  c.head_dim, true);
  weight_gradient(t[kQuery], b.dq, b.norm1, sums, first);
  weight_gradient(t[kKey], b.dk, b.norm1, sums, first);
  weight_gradient(t[kValue], b.dv, b.norm1, sums, first);
  input_gradient(kQuery, b.dq, b.d_norm, false);
  input_gradient(kKey, b.dk, b.d_norm, true);
  input_gradient(kValue, b.dv, b.d_norm, true);
  norm_gradient(t[kInputNorm], weights, x, b.rstd1, b.d_norm, dy, sums, first);
}

void Llama::block_backward(uint32_t layer, const void* weights, const int32_t* document_begins,
                           const void* input, void* gradient, float* sums, bool first) const {
  const LayerShape& shape = model_.layers[layer];
  const float* const x = static_cast<const float*>(input);
  float* const dy = static_cast<float*>(gradient);
  if (first && sums != nullptr) zero_untrained(shape, sums);
  Block b = carve(true, document_begins);
  attention_forward(shape, weights, x, b);
  mlp_forward(shape, weights, b);
  mlp_backward(shape, weights, dy, sums, first, b);
  attention_backward(shape, weights, x, dy, sums, first, b);
}

WeightView Llama::output_projection(const Head& head) const {
  if (head.embedding != nullptr) return view(head.embedding, model_.layers[0].tensors[0]);
  return view(head.weights, model_.layers.back().tensors[kOutput]);
}

double Llama::loss(const Head& head, const float* x, const int32_t* targets, float scale,
                   float* dx) const {
  const ModelConfig& c = model_.config;
  const LayerShape& shape = model_.layers.back();
  const uint64_t d = c.hidden_size, vocabulary = c.vocab_size, n = batch_.tokens();
  const bool backward = dx != nullptr;
  Bump bump(buffers_);
  float* logits = bump.floats(loss_rows() * vocabulary);
  float* norm = bump.floats(loss_rows() * d);
  float* d_norm = bump.floats(loss_rows() * d);
  float* rstd = bump.floats(loss_rows());
  float* losses = bump.floats(loss_rows());
  const WeightView norm_weight = view(head.weights, shape.tensors[kFinalNorm]);
  const WeightView projection = output_projection(head);
  float* norm_sums = nullptr;
  float* projection_sums = nullptr;
  if (backward && shape.tensors[kFinalNorm].trainable) {
    norm_sums = head.sums + shape.tensors[kFinalNorm].offset;
  }
  if (backward && head.embedding != nullptr) {
    projection_sums = head.embedding_sums;
  } else if (backward && shape.tensors[kOutput].trainable) {
    projection_sums = head.sums + shape.tensors[kOutput].offset;
  }
  if (head.first && head.sums != nullptr) zero_untrained(shape, head.sums);
  if (head.first && head.embedding_sums != nullptr) {
    zero_untrained(model_.layers[0], head.embedding_sums);
  }
  double total = 0;
  for (uint64_t row = 0; row < n; row += loss_rows()) {
    const uint64_t rows = std::min(loss_rows(), n - row);
    const bool accumulate = !(head.first && row == 0);
    const LinearShape linear{rows, d, vocabulary};
    kernels_.rms_norm(x + row * d, norm_weight, static_cast<float>(c.rms_norm_eps), norm, rstd,
                      rows, d);
    kernels_.linear(thread_scratch_, linear, norm, projection, logits, false);
    kernels_.cross_entropy(logits, targets + row, backward ? scale : 0.0f, losses, rows,
                           vocabulary);
    for (uint64_t i = 0; i < rows; ++i) total += losses[i];
    if (!backward) continue;
    if (projection_sums != nullptr) {
      kernels_.linear_weight_gradient(linear, logits, norm, projection_sums, accumulate);
    }
    kernels_.linear_input_gradient(thread_scratch_, linear, logits, projection, d_norm, false);
    std::fill_n(dx + row * d, rows * d, 0.0f);
    kernels_.rms_norm_gradient(x + row * d, norm_weight, rstd, d_norm, dx + row * d, norm_sums,
                               accumulate, rows, d);
  }
  return total;
}

void Llama::loss(const Head& head, const void* x, const int32_t* targets, float scale, void* dx,
                 double* total) const {
  *total = loss(head, static_cast<const float*>(x), targets, scale, static_cast<float*>(dx));
}

void Llama::logits(const Head& head, const float* x, float* out) const {
  const ModelConfig& c = model_.config;
  const uint64_t n = batch_.tokens();
  std::vector<float> norm(n * c.hidden_size), rstd(n);
  kernels_.rms_norm(x, view(head.weights, model_.layers.back().tensors[kFinalNorm]),
                    static_cast<float>(c.rms_norm_eps), norm.data(), rstd.data(), n, c.hidden_size);
  kernels_.linear(thread_scratch_, {n, c.hidden_size, c.vocab_size}, norm.data(),
                  output_projection(head), out, false);
}

}  // namespace overspill
