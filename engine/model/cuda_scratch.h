// The scratch memory of the Llama family's layers on a GPU, and of the maths of state there, cut
// into buffers. Needs nothing of CUDA: plans for GPUs are made on machines without one.
#pragma once

#include <cstddef>
#include <cstdint>

#include "engine/base/dtype.h"
#include "engine/model/layers.h"
#include "engine/model/model.h"

namespace overspill {

struct CudaScratch {
  // Kept through a call, whatever it computes.
  float* rotary;  ///< rotary_table()
  int32_t* tokens;
  int32_t* targets;
  int32_t *document_begins, *document_ends;
  double* total;         ///< a loss on its way to the host
  std::byte* workspace;  ///< of the kernel or library that is running

  // A block's activations, of the storage type but for statistics.
  std::byte *norm1, *q, *k, *v, *attention, *middle, *norm2, *gate, *up, *act;
  std::byte *d_attention, *dq, *dk, *dv, *d_norm;
  float *rstd1, *lse, *rstd2;

  // The head's, in the same place: of loss_rows tokens at a time.
  float* logits;  ///< then their gradient, of the storage type
  std::byte *head_norm, *head_d_norm;
  float *head_rstd, *losses;

  uint64_t loss_rows;
  uint64_t workspace_bytes;
  uint64_t bytes;  ///< of all, a multiple of 4096
};

/// Null memory: sizes alone. Every buffer is aligned to 256 bytes.
CudaScratch cut_cuda_scratch(const ModelShape& model, DType type, const BatchShape& batch,
                             uint64_t workspace_bytes, std::byte* memory);

/// Of the maths of state.
struct CudaStateScratch {
  double* total;         ///< a square sum on its way to the host
  double* sums;          ///< Adafactor's of one matrix, on their way to the host
  float* averages;       ///< its moments of one layer's matrices, from the host
  std::byte* workspace;  ///< of the kernel that is running
  uint64_t workspace_bytes;
  uint64_t bytes;  ///< of all, a multiple of 4096
};
CudaStateScratch cut_cuda_state_scratch(const ModelShape& model, std::byte* memory);

/// The largest workspace that attention on tensor cores may use.
inline constexpr uint64_t kMostAttentionWorkspace = uint64_t{1} << 30;

/// Both scratches on a GPU that is not there to be asked, with the largest workspaces.
uint64_t cuda_scratch_bytes(const ModelShape& model, DType type, const BatchShape& batch);

}  // namespace overspill
