// The three matrix products of a linear layer by cuBLASLt: those of kernels.h, with bf16 or float32
// operands, float32 sums, and an addend where that saves a pass. Each shape's algorithm is chosen
// once, so that all products of a run take the same one, and it sums in a fixed order. Not
// thread-safe; products of one GemmPlans share a workspace and must be on one stream at a time.
#pragma once

#include <cstdint>
#include <memory>

#include "engine/base/dtype.h"
#include "engine/model/cuda_blas_library.h"
#include "engine/model/kernels.h"

namespace overspill::cuda {

enum class GemmProduct : uint8_t { linear, input_gradient, weight_gradient };

/// bf16 operands give bf16 or float32, float32 operands give float32 (without TF32).
struct GemmTypes {
  DType operands;
  DType result;
};

/// As much as NVIDIA recommends for GPUs with large L2 caches.
inline constexpr uint64_t kGemmWorkspaceBytes = uint64_t{32} << 20;

class GemmPlans {
 public:
  /// On the current GPU. Algorithms that need a larger workspace are not taken.
  GemmPlans(const BlasLibrary& library, uint64_t most_workspace_bytes);
  ~GemmPlans();

  /// Chooses the algorithm, unless it is chosen already. Call it before the first step: a product
  /// that was not prepared is prepared when it is first asked for, which may take memory and time.
  /// Returns the workspace it needs. Throws Error(io) when cuBLASLt has none.
  uint64_t prepare(GemmProduct product, const LinearShape& shape, GemmTypes types);
  /// What the products prepared so far need at most.
  uint64_t workspace_bytes() const { return needed_bytes_; }
  /// On the GPU, aligned to 256 bytes. At least workspace_bytes().
  void use_workspace(void* memory, uint64_t bytes);

  // All row-major and aligned to 16 bytes. `addend` has the result's type and shape and is added to
  // it: null for none, the result itself to accumulate, or other memory, as of a residual.

  /// y[rows,out] = x[rows,in] W[out,in]^T + addend.
  void linear(cudaStream_t stream, const LinearShape& shape, GemmTypes types, const void* x,
              const void* w, void* y, const void* addend = nullptr);
  /// dx[rows,in] = dy[rows,out] W[out,in] + addend.
  void linear_input_gradient(cudaStream_t stream, const LinearShape& shape, GemmTypes types,
                             const void* dy, const void* w, void* dx, const void* addend = nullptr);
  /// dW[out,in] = dy[rows,out]^T x[rows,in] + addend.
  void linear_weight_gradient(cudaStream_t stream, const LinearShape& shape, GemmTypes types,
                              const void* dy, const void* x, void* dw,
                              const void* addend = nullptr);

 private:
  struct Plan;
  struct Plans;
  const Plan& plan(GemmProduct product, const LinearShape& shape, GemmTypes types);
  void run(cudaStream_t stream, const Plan& plan, const void* a, const void* b, const void* addend,
           void* result);

  BlasLibrary library_;
  cublasLtHandle_t handle_ = nullptr;
  uint64_t most_bytes_, needed_bytes_ = 0, workspace_bytes_ = 0;
  void* workspace_ = nullptr;
  std::unique_ptr<Plans> plans_;
};

}  // namespace overspill::cuda
