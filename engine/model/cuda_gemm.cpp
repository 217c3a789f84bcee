// cuBLASLt is column-major: a row-major matrix is its transpose there. So each product is written
// as the transposed one, with the right operand of ours first.
#include "engine/model/cuda_gemm.h"

#include <algorithm>
#include <compare>
#include <map>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include "engine/base/error.h"

namespace overspill::cuda {
namespace {

constexpr uint32_t kAlignment = 16;
constexpr uint64_t kWorkspaceAlignment = 256;

bool is_aligned(const void* memory, uint64_t bytes) {
  return reinterpret_cast<uintptr_t>(memory) % bytes == 0;
}

cudaDataType_t cuda_type(DType type) {
  CHECK(type == DType::f32 || type == DType::bf16);
  return type == DType::f32 ? CUDA_R_32F : CUDA_R_16BF;
}

struct Key {
  GemmProduct product;
  DType operands, result;
  uint64_t rows, in, out;
  auto operator<=>(const Key&) const = default;
};

std::string describe(const Key& key) {
  const char* name = key.product == GemmProduct::linear           ? "linear"
                     : key.product == GemmProduct::input_gradient ? "linear_input_gradient"
                                                                  : "linear_weight_gradient";
  return fmt::format("{} of {} rows, {} in, {} out, {} to {}", name, key.rows, key.in, key.out,
                     dtype_name(key.operands), dtype_name(key.result));
}

/// Column-major: D[m,n] = op(A)[m,k] op(B)[k,n].
struct Columns {
  bool transpose_a, transpose_b;
  uint64_t m, n, k;
};

Columns columns_of(const Key& key) {
  switch (key.product) {
    case GemmProduct::linear: return {true, false, key.out, key.rows, key.in};
    case GemmProduct::input_gradient: return {false, false, key.in, key.rows, key.out};
    case GemmProduct::weight_gradient: return {false, true, key.in, key.out, key.rows};
  }
  CHECK(false);
  return {};
}

/// A descriptor of cuBLASLt, freed by the function that it gives.
template <class T>
using Owned = std::unique_ptr<std::remove_pointer_t<T>, cublasStatus_t (*)(T)>;

void check(const BlasLibrary& library, cublasStatus_t status, const char* doing, const Key& key) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  fail(ErrorCode::io, "cuBLASLt cannot {} ({}): {} ({})", doing, describe(key),
       library.status_text(status), static_cast<int>(status));
}

Owned<cublasLtMatrixLayout_t> layout(const BlasLibrary& library, const Key& key, DType type,
                                     uint64_t rows, uint64_t columns) {
  cublasLtMatrixLayout_t made = nullptr;
  check(library,
        library.create_layout(&made, cuda_type(type), rows, columns, static_cast<int64_t>(rows)),
        "describe a matrix", key);
  return {made, library.destroy_layout};
}

Owned<cublasLtMatmulDesc_t> operation(const BlasLibrary& library, const Key& key,
                                      const Columns& columns) {
  cublasLtMatmulDesc_t made = nullptr;
  // Exact float32 sums; TF32 would be a compute type of its own.
  check(library, library.create_product(&made, CUBLAS_COMPUTE_32F, CUDA_R_32F),
        "describe a matrix product", key);
  Owned<cublasLtMatmulDesc_t> owned(made, library.destroy_product);
  const int32_t a = columns.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N;
  const int32_t b = columns.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N;
  check(library, library.set_product(made, CUBLASLT_MATMUL_DESC_TRANSA, &a, sizeof a),
        "transpose the first matrix", key);
  check(library, library.set_product(made, CUBLASLT_MATMUL_DESC_TRANSB, &b, sizeof b),
        "transpose the second matrix", key);
  return owned;
}

Owned<cublasLtMatmulPreference_t> preference(const BlasLibrary& library, const Key& key,
                                             uint64_t most_workspace_bytes) {
  cublasLtMatmulPreference_t made = nullptr;
  check(library, library.create_preference(&made), "make a preference", key);
  Owned<cublasLtMatmulPreference_t> owned(made, library.destroy_preference);
  const auto set = [&](cublasLtMatmulPreferenceAttributes_t name, const auto& value) {
    check(library, library.set_preference(made, name, &value, sizeof value), "set a preference",
          key);
  };
  set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, most_workspace_bytes);
  // Parts of a sum are kept in float32 and added in a fixed order, never in the result's own type.
  set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
      static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, kAlignment);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, kAlignment);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, kAlignment);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, kAlignment);
  return owned;
}

}  // namespace

struct GemmPlans::Plan {
  Key key;
  Owned<cublasLtMatmulDesc_t> operation;
  Owned<cublasLtMatrixLayout_t> a, b, result;
  cublasLtMatmulAlgo_t algorithm{};
  uint64_t workspace_bytes = 0;
};

struct GemmPlans::Plans {
  std::map<Key, Plan> by_key;
};

GemmPlans::GemmPlans(const BlasLibrary& library, uint64_t most_workspace_bytes)
    : library_(library), most_bytes_(most_workspace_bytes), plans_(std::make_unique<Plans>()) {
  const cublasStatus_t status = library_.create(&handle_);
  if (status == CUBLAS_STATUS_SUCCESS) return;
  fail(ErrorCode::io, "cuBLASLt cannot make a context on the GPU: {} ({})",
       library_.status_text(status), static_cast<int>(status));
}

GemmPlans::~GemmPlans() {
  plans_.reset();
  library_.destroy(handle_);
}

void GemmPlans::use_workspace(void* memory, uint64_t bytes) {
  CHECK(bytes >= needed_bytes_ && is_aligned(memory, kWorkspaceAlignment));
  workspace_ = memory;
  workspace_bytes_ = bytes;
}

uint64_t GemmPlans::prepare(GemmProduct product, const LinearShape& shape, GemmTypes types) {
  return plan(product, shape, types).workspace_bytes;
}

const GemmPlans::Plan& GemmPlans::plan(GemmProduct product, const LinearShape& shape,
                                       GemmTypes types) {
  const Key key{product, types.operands, types.result, shape.rows, shape.in, shape.out};
  if (const auto found = plans_->by_key.find(key); found != plans_->by_key.end()) {
    return found->second;
  }
  CHECK(shape.rows > 0 && shape.in > 0 && shape.out > 0);
  CHECK(types.operands == DType::bf16 || types.result == DType::f32);
  const Columns columns = columns_of(key);
  const auto [m, n, k] = std::tuple(columns.m, columns.n, columns.k);
  Plan made{key, operation(library_, key, columns),
            layout(library_, key, types.operands, columns.transpose_a ? k : m,
                   columns.transpose_a ? m : k),
            layout(library_, key, types.operands, columns.transpose_b ? n : k,
                   columns.transpose_b ? k : n),
            layout(library_, key, types.result, m, n)};
  const auto preferred = preference(library_, key, most_bytes_);
  cublasLtMatmulHeuristicResult_t choice{};
  int choices = 0;
  check(
      library_,
      library_.choose(handle_, made.operation.get(), made.a.get(), made.b.get(), made.result.get(),
                      made.result.get(), preferred.get(), 1, &choice, &choices),
      "choose an algorithm for a matrix product", key);
  if (choices == 0) choice.state = CUBLAS_STATUS_NOT_SUPPORTED;
  check(library_, choice.state, "find an algorithm for a matrix product", key);
  made.algorithm = choice.algo;
  made.workspace_bytes = choice.workspaceSize;
  needed_bytes_ = std::max<uint64_t>(needed_bytes_, made.workspace_bytes);
  return plans_->by_key.emplace(key, std::move(made)).first->second;
}

void GemmPlans::run(cudaStream_t stream, const Plan& plan, const void* a, const void* b,
                    const void* addend, void* result) {
  CHECK(plan.workspace_bytes <= workspace_bytes_);
  for (const void* memory : {a, b, addend, static_cast<const void*>(result)}) {
    CHECK(is_aligned(memory, kAlignment));
  }
  const float alpha = 1.0f, beta = addend ? 1.0f : 0.0f;
  check(library_,
        library_.matmul(handle_, plan.operation.get(), &alpha, a, plan.a.get(), b, plan.b.get(),
                        &beta, addend ? addend : result, plan.result.get(), result,
                        plan.result.get(), &plan.algorithm, workspace_, workspace_bytes_, stream),
        "multiply", plan.key);
}

void GemmPlans::linear(cudaStream_t stream, const LinearShape& shape, GemmTypes types,
                       const void* x, const void* w, void* y, const void* addend) {
  run(stream, plan(GemmProduct::linear, shape, types), w, x, addend, y);
}

void GemmPlans::linear_input_gradient(cudaStream_t stream, const LinearShape& shape,
                                      GemmTypes types, const void* dy, const void* w, void* dx,
                                      const void* addend) {
  run(stream, plan(GemmProduct::input_gradient, shape, types), w, dy, addend, dx);
}

void GemmPlans::linear_weight_gradient(cudaStream_t stream, const LinearShape& shape,
                                       GemmTypes types, const void* dy, const void* x, void* dw,
                                       const void* addend) {
  run(stream, plan(GemmProduct::weight_gradient, shape, types), x, dy, addend, dw);
}

}  // namespace overspill::cuda
