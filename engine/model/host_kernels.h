// The host's kernels, one file a family. Internal to engine/model.
#pragma once

#include "engine/model/kernels.h"

namespace overspill::host {

void linear(const KernelScratch&, const LinearShape&, const float* x, WeightView w, float* y,
            bool accumulate);
void linear_input_gradient(const KernelScratch&, const LinearShape&, const float* dy, WeightView w,
                           float* dx, bool accumulate);
void linear_weight_gradient(const LinearShape&, const float* dy, const float* x, float* dw,
                            bool accumulate);
void attention(const KernelScratch&, const AttentionShape&, const int32_t* document_begins,
               const float* q, const float* k, const float* v, float* o, float* lse);
void attention_gradient(const KernelScratch&, const AttentionShape&, const int32_t* document_begins,
                        const float* q, const float* k, const float* v, const float* o,
                        const float* lse, const float* d_o, float* dq, float* dk, float* dv);
void embed(const int32_t* tokens, WeightView table, float* y, uint64_t rows, uint64_t d);
void embed_gradient(const int32_t* tokens, const float* dy, float* dtable, uint64_t rows,
                    uint64_t d);
void rms_norm(const float* x, WeightView w, float eps, float* y, float* rstd, uint64_t rows,
              uint64_t d);
void rms_norm_gradient(const float* x, WeightView w, const float* rstd, const float* dy, float* dx,
                       float* dw, bool accumulate_dw, uint64_t rows, uint64_t d);
void rotate(float* x, const float* table, uint64_t batch, uint64_t sequence_len, uint64_t heads,
            uint64_t head_dim, bool inverse);
void swiglu(const float* gate, const float* up, float* y, uint64_t size);
void swiglu_gradient(float* gate, float* up, const float* dy, uint64_t size);
void cross_entropy(float* logits, const int32_t* targets, float scale, float* loss, uint64_t rows,
                   uint64_t vocabulary);
void add(const float* x, float* y, uint64_t size);
double sum_of_squares(const float* x, uint64_t size);
void row_column_squares(const float* x, uint64_t rows, uint64_t columns, double* row_sums,
                        double* column_sums);
void float_to_bf16(const float* src, uint16_t* dst, uint64_t size);

}  // namespace overspill::host
