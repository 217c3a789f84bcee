// One table of compute kernels per device; the host's is the reference for every other. All
// activations are float32, row-major. Results are bitwise independent of the number of threads:
// work is cut by shape alone and every reduction has a fixed order.
#pragma once

#include <cstddef>
#include <cstdint>

#include "engine/base/dtype.h"

namespace overspill {

/// The target of a token that is not trained on: it has no loss and no gradient.
inline constexpr int32_t kNotTrained = -1;

/// A weight tensor as it lies on the device.
struct WeightView {
  const void* values;
  DType type;  ///< f32 or bf16
};

/// Memory for one task at a time and thread: kThreadScratchBytes per place of the pool.
struct KernelScratch {
  std::byte* memory = nullptr;
};
inline constexpr uint64_t kThreadScratchBytes = uint64_t{1} << 20;

struct LinearShape {
  uint64_t rows;  ///< tokens
  uint64_t in;
  uint64_t out;
};

struct AttentionShape {
  uint64_t batch;
  uint64_t sequence_len;
  uint32_t heads;
  uint32_t kv_heads;
  uint32_t head_dim;
};

struct Kernels {
  /// y[rows,out] (+)= x[rows,in] W[out,in]^T.
  void (*linear)(const KernelScratch&, const LinearShape&, const float* x, WeightView w, float* y,
                 bool accumulate);
  /// dx[rows,in] (+)= dy[rows,out] W[out,in].
  void (*linear_input_gradient)(const KernelScratch&, const LinearShape&, const float* dy,
                                WeightView w, float* dx, bool accumulate);
  /// dW[out,in] (+)= dy^T x.
  void (*linear_weight_gradient)(const LinearShape&, const float* dy, const float* x, float* dw,
                                 bool accumulate);
  /// y[rows,d] = table[tokens[row]].
  void (*embed)(const int32_t* tokens, WeightView table, float* y, uint64_t rows, uint64_t d);
  /// dtable[tokens[row]] += dy[row], in row order.
  void (*embed_gradient)(const int32_t* tokens, const float* dy, float* dtable, uint64_t rows,
                         uint64_t d);
  /// y = x * rstd * w with rstd = 1/sqrt(mean(x^2) + eps) (Zhang and Sennrich 2019); rstd[rows].
  void (*rms_norm)(const float* x, WeightView w, float eps, float* y, float* rstd, uint64_t rows,
                   uint64_t d);
  /// dx += d(loss)/dx and dw (+)= d(loss)/dw, given dy = d(loss)/dy; without dw when it is null.
  void (*rms_norm_gradient)(const float* x, WeightView w, const float* rstd, const float* dy,
                            float* dx, float* dw, bool accumulate_dw, uint64_t rows, uint64_t d);
  /// Rotates pairs (j, j + head_dim/2) of x[batch*sequence_len, heads, head_dim] in place by the
  /// position's angle (Su et al. 2021, Hugging Face's half-split layout); table[t] holds head_dim/2
  /// cosines, then as many sines.
  /// `inverse` rotates back, which is the gradient.
  void (*rotate)(float* x, const float* table, uint64_t batch, uint64_t sequence_len,
                 uint64_t heads, uint64_t head_dim, bool inverse);
  /// Causal attention, o = softmax(q k^T / sqrt(head_dim)) v per head, blockwise with a running
  /// softmax (Milakov and Gimelshein 2018; Dao 2022). lse[batch*sequence_len, heads].
  /// document_begins[batch*sequence_len] as in Model::block: a token sees no key before its own.
  void (*attention)(const KernelScratch&, const AttentionShape&, const int32_t* document_begins,
                    const float* q, const float* k, const float* v, float* o, float* lse);
  void (*attention_gradient)(const KernelScratch&, const AttentionShape&,
                             const int32_t* document_begins, const float* q, const float* k,
                             const float* v, const float* o, const float* lse, const float* d_o,
                             float* dq, float* dk, float* dv);
  /// y = silu(gate) * up.
  void (*swiglu)(const float* gate, const float* up, float* y, uint64_t size);
  /// gate <- dgate, up <- dup, given dy.
  void (*swiglu_gradient)(float* gate, float* up, const float* dy, uint64_t size);
  /// loss[row] = -log softmax(logits[row])[target]; when `scale` is not 0, logits become
  /// scale * (softmax - onehot). Both are 0 where the target is kNotTrained.
  void (*cross_entropy)(float* logits, const int32_t* targets, float scale, float* loss,
                        uint64_t rows, uint64_t vocabulary);
  /// y += x.
  void (*add)(const float* x, float* y, uint64_t size);
  /// Sum of squares in fp64, in fixed blocks; NaN or infinite when any element is.
  double (*sum_of_squares)(const float* x, uint64_t size);
  /// Sums of squares in fp64 over each row and each column of x[rows,columns], in fixed blocks.
  void (*row_column_squares)(const float* x, uint64_t rows, uint64_t columns, double* row_sums,
                             double* column_sums);
  /// Rounds to nearest even. dst may be src: then the front half of the memory receives the result.
  void (*float_to_bf16)(const float* src, uint16_t* dst, uint64_t size);
};

const Kernels& host_kernels();

}  // namespace overspill
