// cuBLASLt's matrix products on host memory, by OpenBLAS in float32. Stricter than cuBLASLt: wrong
// layouts, types, alignment, workspace and overlapping matrices are errors with a text, an
// algorithm works only for the product it was chosen for, and the workspace is overwritten.
#include "tests/emulation/fake_cublaslt.h"

#include <cublasLt.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "engine/base/dtype.h"
#include "engine/model/blas.h"

namespace {

constexpr uint64_t kLive = 0x6c69766500000001, kDead = 0x64656164;
constexpr uint64_t kNeededWorkspace = 4096, kWorkspaceAlignment = 256;

std::atomic<FakeCublasLtEnqueue> enqueue_hook{nullptr};
std::atomic<int> live_objects{0}, choices{0}, failing_product{0};
std::atomic<bool> finds_nothing{false};
thread_local std::string last_text = "no error";

cublasStatus_t wrong(cublasStatus_t status, const std::string& text) {
  last_text = text;
  std::fprintf(stderr, "fake cuBLASLt: %s\n", text.c_str());
  return status;
}

cublasStatus_t invalid(const std::string& text) { return wrong(CUBLAS_STATUS_INVALID_VALUE, text); }

struct Handle {
  uint64_t state = kLive;
};

struct Layout {
  uint64_t state = kLive;
  cudaDataType type;
  uint64_t rows, columns;
  int64_t ld;
  bool operator==(const Layout&) const = default;
  uint64_t bytes() const {
    return ((columns - 1) * static_cast<uint64_t>(ld) + rows) * (type == CUDA_R_32F ? 4 : 2);
  }
};

struct Operation {
  uint64_t state = kLive;
  cublasComputeType_t compute;
  cudaDataType scale;
  int32_t transpose_a = CUBLAS_OP_N, transpose_b = CUBLAS_OP_N;
  bool operator==(const Operation&) const = default;
};

struct Preference {
  uint64_t state = kLive;
  uint64_t workspace_bytes = 0;
  uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_MASK;
  uint32_t alignments[4] = {256, 256, 256, 256};  // of A, B, C, D
};

/// What cublasLtMatmulAlgo_t holds: a number and the product that it is for.
struct Algorithm {
  uint64_t product, workspace_bytes;
  uint32_t alignments[4];
};
static_assert(sizeof(Algorithm) <= sizeof(cublasLtMatmulAlgo_t));

template <class To, class From>
To* as(From* object) {
  return reinterpret_cast<To*>(object);
}
template <class T>
bool alive(const T* object) {
  return object && object->state == kLive;
}

template <class T, class Out>
cublasStatus_t make(Out* out, T object) {
  if (!out) return invalid("a descriptor is made into a null pointer");
  *out = reinterpret_cast<Out>(new T(object));
  ++live_objects;
  return CUBLAS_STATUS_SUCCESS;
}

template <class T>
cublasStatus_t destroy(T* object) {
  if (!alive(object)) return invalid("something is destroyed that is not alive");
  object->state = kDead;
  delete object;
  --live_objects;
  return CUBLAS_STATUS_SUCCESS;
}

template <class T>
cublasStatus_t take(T& to, const void* from, size_t bytes) {
  if (!from || bytes != sizeof(T)) return invalid("an attribute has a wrong size");
  std::memcpy(&to, from, bytes);
  return CUBLAS_STATUS_SUCCESS;
}

bool known_type(cudaDataType type) { return type == CUDA_R_16BF || type == CUDA_R_32F; }

struct Product {
  Operation operation;
  Layout a, b, c, d;
  uint64_t m() const { return d.rows; }
  uint64_t n() const { return d.columns; }
  uint64_t k() const { return operation.transpose_a == CUBLAS_OP_T ? a.rows : a.columns; }
  /// Differs for products that need another algorithm.
  uint64_t fingerprint() const {
    uint64_t hash = 1469598103934665603u;
    for (const uint64_t value :
         {uint64_t(operation.transpose_a), uint64_t(operation.transpose_b), uint64_t(a.type),
          uint64_t(d.type), m(), n(), k(), uint64_t(a.ld), uint64_t(b.ld), uint64_t(d.ld)}) {
      hash = (hash ^ value) * 1099511628211u;
    }
    return hash;
  }
};

cublasStatus_t check_types(const Product& p) {
  if (p.operation.compute != CUBLAS_COMPUTE_32F || p.operation.scale != CUDA_R_32F) {
    return wrong(CUBLAS_STATUS_NOT_SUPPORTED, "sums that are not float32");
  }
  if (!known_type(p.a.type) || p.a.type != p.b.type || p.c.type != p.d.type ||
      !known_type(p.d.type) || (p.a.type == CUDA_R_32F && p.d.type != CUDA_R_32F)) {
    return wrong(CUBLAS_STATUS_NOT_SUPPORTED, "a combination of types that cuBLASLt has not");
  }
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t check_product(const Product& p) {
  for (const Layout* layout : {&p.a, &p.b, &p.c, &p.d}) {
    if (layout->rows == 0 || layout->columns == 0) return invalid("an empty matrix");
    if (layout->ld < static_cast<int64_t>(layout->rows)) {
      return invalid("a leading dimension smaller than the rows");
    }
  }
  const bool ta = p.operation.transpose_a == CUBLAS_OP_T;
  const bool tb = p.operation.transpose_b == CUBLAS_OP_T;
  if ((ta ? p.a.columns : p.a.rows) != p.m() || (tb ? p.b.rows : p.b.columns) != p.n() ||
      (tb ? p.b.columns : p.b.rows) != p.k() || p.c.rows != p.m() || p.c.columns != p.n()) {
    return invalid("matrices of " + std::to_string(p.m()) + " x " + std::to_string(p.n()) + " x " +
                   std::to_string(p.k()) + " that do not fit each other");
  }
  return check_types(p);
}

bool read_product(cublasLtMatmulDesc_t operation, cublasLtMatrixLayout_t a,
                  cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                  Product& product) {
  for (cublasLtMatrixLayout_t layout : {a, b, c, d}) {
    if (!alive(as<Layout>(layout))) return false;
  }
  if (!alive(as<Operation>(operation))) return false;
  product = {*as<Operation>(operation), *as<Layout>(a), *as<Layout>(b), *as<Layout>(c),
             *as<Layout>(d)};
  return true;
}

bool overlap(const void* a, uint64_t a_bytes, const void* b, uint64_t b_bytes) {
  const auto from_a = reinterpret_cast<uintptr_t>(a), from_b = reinterpret_cast<uintptr_t>(b);
  return from_a < from_b + b_bytes && from_b < from_a + a_bytes;
}

/// A product on its way along a stream.
struct Task {
  Product product;
  float alpha, beta;
  const void *a, *b, *c;
  void *d, *workspace;
  uint64_t workspace_bytes;
};

std::vector<float> read(const void* memory, const Layout& layout) {
  const uint64_t size = layout.bytes() / (layout.type == CUDA_R_32F ? 4 : 2);
  std::vector<float> values(size);
  if (layout.type == CUDA_R_32F) {
    std::memcpy(values.data(), memory, size * sizeof(float));
  } else {
    const auto* from = static_cast<const uint16_t*>(memory);
    std::transform(from, from + size, values.begin(), overspill::bf16_to_float);
  }
  return values;
}

void write(const std::vector<float>& values, void* memory, const Layout& layout) {
  for (uint64_t column = 0; column < layout.columns; ++column) {
    for (uint64_t row = 0; row < layout.rows; ++row) {
      const uint64_t at = column * static_cast<uint64_t>(layout.ld) + row;
      if (layout.type == CUDA_R_32F) {
        static_cast<float*>(memory)[at] = values[at];
      } else {
        static_cast<uint16_t*>(memory)[at] = overspill::float_to_bf16(values[at]);
      }
    }
  }
}

void multiply(void* argument) {
  const std::unique_ptr<Task> task(static_cast<Task*>(argument));
  const Product& p = task->product;
  if (task->workspace_bytes > 0) std::memset(task->workspace, 0xcd, task->workspace_bytes);
  const std::vector<float> a = read(task->a, p.a), b = read(task->b, p.b);
  // C has D's place in memory, as float32, when it is added.
  std::vector<float> d = task->beta != 0.0f
                             ? read(task->c, p.c)
                             : std::vector<float>(p.d.bytes() / (p.d.type == CUDA_R_32F ? 4 : 2));
  // Row-major, all matrices are their transposes.
  overspill::host::gemm(p.operation.transpose_b == CUBLAS_OP_T ? CblasTrans : CblasNoTrans,
                        p.operation.transpose_a == CUBLAS_OP_T ? CblasTrans : CblasNoTrans, p.n(),
                        p.m(), p.k(), task->alpha, b.data(), static_cast<uint64_t>(p.b.ld),
                        a.data(), static_cast<uint64_t>(p.a.ld), task->beta, d.data(),
                        static_cast<uint64_t>(p.d.ld));
  write(d, task->d, p.d);
}

cublasStatus_t check_memory(const Task& task, const Algorithm& algorithm) {
  const void* const memory[4] = {task.a, task.b, task.c, task.d};
  for (int i = 0; i < 4; ++i) {
    if (!memory[i]) return invalid("a null matrix");
    if (reinterpret_cast<uintptr_t>(memory[i]) % algorithm.alignments[i] != 0) {
      return invalid("a matrix is less aligned than was promised");
    }
  }
  const Product& p = task.product;
  if (overlap(task.a, p.a.bytes(), task.d, p.d.bytes()) ||
      overlap(task.b, p.b.bytes(), task.d, p.d.bytes())) {
    return invalid("the result overlaps an operand");
  }
  const bool in_place = task.c == task.d && p.c == p.d;
  if (!in_place && overlap(task.c, p.c.bytes(), task.d, p.d.bytes())) {
    return invalid("the result overlaps the addend");
  }
  if (!(p.c == p.d)) return invalid("an addend that does not lie as the result does");
  if (task.workspace_bytes < algorithm.workspace_bytes ||
      (algorithm.workspace_bytes > 0 && !task.workspace)) {
    return invalid("the workspace is smaller than the algorithm needs");
  }
  if (reinterpret_cast<uintptr_t>(task.workspace) % kWorkspaceAlignment != 0) {
    return invalid("the workspace is not aligned to 256 bytes");
  }
  return CUBLAS_STATUS_SUCCESS;
}

}  // namespace

extern "C" {

void fake_cublaslt_set_enqueue(FakeCublasLtEnqueue enqueue) { enqueue_hook = enqueue; }
void fake_cublaslt_fail_product(int call) { failing_product = call; }
void fake_cublaslt_find_nothing(bool nothing) { finds_nothing = nothing; }
int fake_cublaslt_live_objects() { return live_objects; }
int fake_cublaslt_choices() { return choices; }
const char* fake_cublaslt_last_error() { return last_text.c_str(); }

const char* cublasLtGetStatusString(cublasStatus_t status) {
  switch (status) {
    case CUBLAS_STATUS_SUCCESS: return "CUBLAS_STATUS_SUCCESS";
    case CUBLAS_STATUS_INVALID_VALUE: return "CUBLAS_STATUS_INVALID_VALUE";
    case CUBLAS_STATUS_NOT_SUPPORTED: return "CUBLAS_STATUS_NOT_SUPPORTED";
    case CUBLAS_STATUS_EXECUTION_FAILED: return "CUBLAS_STATUS_EXECUTION_FAILED";
    default: return "another status";
  }
}

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) { return make(handle, Handle{}); }
cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) { return destroy(as<Handle>(handle)); }

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType type,
                                          uint64_t rows, uint64_t columns, int64_t ld) {
  return make(layout, Layout{kLive, type, rows, columns, ld});
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
  return destroy(as<Layout>(layout));
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* operation,
                                        cublasComputeType_t compute, cudaDataType_t scale) {
  return make(operation, Operation{kLive, compute, scale});
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t operation) {
  return destroy(as<Operation>(operation));
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t operation,
                                              cublasLtMatmulDescAttributes_t name,
                                              const void* value, size_t bytes) {
  if (!alive(as<Operation>(operation))) return invalid("an attribute of no product");
  switch (name) {
    case CUBLASLT_MATMUL_DESC_TRANSA:
      return take(as<Operation>(operation)->transpose_a, value, bytes);
    case CUBLASLT_MATMUL_DESC_TRANSB:
      return take(as<Operation>(operation)->transpose_b, value, bytes);
    default: return wrong(CUBLAS_STATUS_NOT_SUPPORTED, "an attribute of products that it lacks");
  }
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
  return make(preference, Preference{});
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
  return destroy(as<Preference>(preference));
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t name,
                                                    const void* value, size_t bytes) {
  Preference* const to = as<Preference>(preference);
  if (!alive(to)) return invalid("an attribute of no preference");
  switch (name) {
    case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES: return take(to->workspace_bytes, value, bytes);
    case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK: return take(to->reductions, value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES: return take(to->alignments[0], value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES: return take(to->alignments[1], value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES: return take(to->alignments[2], value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES: return take(to->alignments[3], value, bytes);
    default: return wrong(CUBLAS_STATUS_NOT_SUPPORTED, "a preference that it lacks");
  }
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle,
                                              cublasLtMatmulDesc_t operation,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int most,
                                              cublasLtMatmulHeuristicResult_t results[],
                                              int* count) {
  Product product;
  const Preference* const wish = as<Preference>(preference);
  if (!alive(as<Handle>(handle)) || !alive(wish) || most < 1 || !results || !count ||
      !read_product(operation, a, b, c, d, product)) {
    return invalid("an algorithm is asked for with something that is not alive");
  }
  *count = 0;
  ++choices;
  if (const auto status = check_product(product); status != CUBLAS_STATUS_SUCCESS) return status;
  if (finds_nothing) return CUBLAS_STATUS_NOT_SUPPORTED;
  if (wish->reductions & CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE) {
    return invalid("sums may be rounded to the result's type in between");
  }
  // Long sums are split, in the workspace.
  const bool splits = product.k() >= 4 * product.m() && wish->workspace_bytes >= kNeededWorkspace;
  Algorithm algorithm{product.fingerprint(), splits ? kNeededWorkspace : 0, {}};
  std::copy_n(wish->alignments, 4, algorithm.alignments);
  results[0] = {};
  std::memcpy(&results[0].algo, &algorithm, sizeof algorithm);
  results[0].workspaceSize = algorithm.workspace_bytes;
  results[0].state = CUBLAS_STATUS_SUCCESS;
  *count = 1;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation,
                              const void* alpha, const void* a, cublasLtMatrixLayout_t a_layout,
                              const void* b, cublasLtMatrixLayout_t b_layout, const void* beta,
                              const void* c, cublasLtMatrixLayout_t c_layout, void* d,
                              cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t* algo,
                              void* workspace, size_t workspace_bytes, cudaStream_t stream) {
  Product product;
  if (!alive(as<Handle>(handle)) || !alpha || !beta || !algo ||
      !read_product(operation, a_layout, b_layout, c_layout, d_layout, product)) {
    return invalid("a product of something that is not alive");
  }
  if (const auto status = check_product(product); status != CUBLAS_STATUS_SUCCESS) return status;
  Algorithm algorithm;
  std::memcpy(&algorithm, algo, sizeof algorithm);
  if (algorithm.product != product.fingerprint()) {
    return invalid("an algorithm that was chosen for another product");
  }
  Task task{product,
            *static_cast<const float*>(alpha),
            *static_cast<const float*>(beta),
            a,
            b,
            c,
            d,
            workspace,
            workspace_bytes};
  if (const auto s = check_memory(task, algorithm); s != CUBLAS_STATUS_SUCCESS) return s;
  if (failing_product > 0 && --failing_product == 0) {
    return wrong(CUBLAS_STATUS_EXECUTION_FAILED, "told to fail");
  }
  task.workspace_bytes = algorithm.workspace_bytes;
  auto* const queued = new Task(task);
  if (const FakeCublasLtEnqueue enqueue = enqueue_hook) {
    enqueue(stream, multiply, queued);
  } else {
    multiply(queued);
  }
  return CUBLAS_STATUS_SUCCESS;
}
}
