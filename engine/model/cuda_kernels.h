// The GPU's kernels behind launchers, with the names and meanings of engine/model/kernels.h. A
// launcher enqueues on the stream and returns; all pointers are the device's. T is the storage of
// weights and activations, float or __nv_bfloat16; sums are made in float32 (squares in float64)
// and rounded once when stored. Results are deterministic: no atomics, every order fixed by shapes
// alone. Arrays aligned to 16 bytes and rows of a multiple of 8 elements take vector access, others
// work too. Sizes may be any but 0 rows.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "engine/model/kernels.h"
#include "optim/factored_moment.h"

namespace overspill::cuda {

/// y[rows,d] = table[tokens[row]].
template <class T>
void embed(cudaStream_t stream, const int32_t* tokens, const T* table, T* y, uint64_t rows,
           uint64_t d);
/// dtable[tokens[row]] += dy[row], in row order. The workspace holds the rows of each token.
template <class T>
void embed_gradient(cudaStream_t stream, const int32_t* tokens, const T* dy, float* dtable,
                    void* workspace, uint64_t rows, uint64_t d);
constexpr uint64_t embed_gradient_workspace_bytes(uint64_t rows) { return rows * 4; }

/// y = x * rstd * w with rstd = 1/sqrt(mean(x^2) + eps). The residual's sum x is made by the
/// product before (GemmPlans' addend), which saves a pass.
template <class T>
void rms_norm(cudaStream_t stream, const T* x, const T* w, float eps, T* y, float* rstd,
              uint64_t rows, uint64_t d);
struct NormGradientOptions {
  bool accumulate_dx = true;  ///< dx already holds the residual's gradient
  bool accumulate_dw = true;
};
/// dx (+)= d(loss)/dx and dw (+)= d(loss)/dw; without dw when it is null (then no workspace).
template <class T>
void rms_norm_gradient(cudaStream_t stream, const T* x, const T* w, const float* rstd, const T* dy,
                       T* dx, float* dw, void* workspace, const NormGradientOptions& options,
                       uint64_t rows, uint64_t d);
uint64_t rms_norm_gradient_workspace_bytes(uint64_t rows, uint64_t d);

/// In place; table[t] holds head_dim/2 cosines, then as many sines. `inverse` is the gradient.
template <class T>
void rotate(cudaStream_t stream, T* x, const float* table, uint64_t batch, uint64_t sequence_len,
            uint64_t heads, uint64_t head_dim, bool inverse);
/// y = silu(gate) * up.
template <class T>
void swiglu(cudaStream_t stream, const T* gate, const T* up, T* y, uint64_t size);
/// gate <- dgate, up <- dup, given dy.
template <class T>
void swiglu_gradient(cudaStream_t stream, T* gate, T* up, const T* dy, uint64_t size);
/// y += x: of one type, or bf16 into float32.
template <class X, class Y>
void add(cudaStream_t stream, const X* x, Y* y, uint64_t size);
/// sums (+)= x, of float32, bf16 or float16; `first`: sums receive it as it is.
template <class X>
void accumulate(cudaStream_t stream, const X* x, float* sums, uint64_t size, bool first);
template <class T>
void scale(cudaStream_t stream, T* x, float factor, uint64_t size);
template <class T>
void fill_zero(cudaStream_t stream, T* x, uint64_t size);
/// Rounds to nearest even. dst may be src: then the front half of the memory receives the result.
void float_to_bf16(cudaStream_t stream, const float* src, __nv_bfloat16* dst, uint64_t size);
void bf16_to_float(cudaStream_t stream, const __nv_bfloat16* src, float* dst, uint64_t size);

/// loss[row] = -log softmax(logits[row])[target]; when `scale` is not 0, logits become
/// scale * (softmax - onehot). Both are 0 where the target is kNotTrained.
template <class T>
void cross_entropy(cudaStream_t stream, T* logits, const int32_t* targets, float scale, float* loss,
                   uint64_t rows, uint64_t vocabulary);

/// *total = the sum of x in float64, plus what it was before when `accumulate`.
void sum(cudaStream_t stream, const float* x, uint64_t size, double* total, bool accumulate);
/// *total = the sum of squares in float64, plus what it was before when `accumulate`; NaN or
/// infinite when any element is.
template <class T>
void sum_of_squares(cudaStream_t stream, const T* x, uint64_t size, double* total, bool accumulate,
                    void* workspace);
uint64_t sum_of_squares_workspace_bytes(uint64_t size);
/// Sums of squares in float64 over each row and each column of x[rows,columns].
void row_column_squares(cudaStream_t stream, const float* x, uint64_t rows, uint64_t columns,
                        double* row_sums, double* column_sums, void* workspace);
uint64_t row_column_squares_workspace_bytes(uint64_t rows, uint64_t columns);
/// As overspill::add_part_squares, with its bits; sums[rows + columns] are those of the matrix
/// alone. The workspace is that of row_column_squares.
void add_part_squares(cudaStream_t stream, const float* gradients, uint64_t begin, uint64_t end,
                      const FactoredMatrix& matrix, double* sums, void* workspace);

/// ends[batch*sequence_len]: for each token the position in its sequence behind its document's
/// last.
void document_ends(cudaStream_t stream, const int32_t* document_begins, int32_t* ends,
                   uint64_t batch, uint64_t sequence_len);

/// The largest head_dim of the attention below.
inline constexpr uint32_t kMaxHeadDim = 128;
/// Causal attention without tensor cores, for where cuDNN has no plan. lse[batch*sequence_len,
/// heads], natural logarithm. document_begins[batch*sequence_len] or null.
template <class T>
void attention(cudaStream_t stream, const AttentionShape& shape, const int32_t* document_begins,
               const T* q, const T* k, const T* v, T* o, float* lse);
template <class T>
void attention_gradient(cudaStream_t stream, const AttentionShape& shape,
                        const int32_t* document_begins, const T* q, const T* k, const T* v,
                        const T* o, const float* lse, const T* d_o, T* dq, T* dk, T* dv,
                        void* workspace);
uint64_t attention_gradient_workspace_bytes(const AttentionShape& shape);

}  // namespace overspill::cuda
