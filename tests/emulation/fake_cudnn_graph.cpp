// A tensor's elements are gathered into a dense array, worked on, and scattered back: rounded to
// bf16 where its type is, between operations too.
#include "tests/emulation/fake_cudnn_graph.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

#include "engine/base/dtype.h"
#include "engine/base/error.h"
#include "engine/model/blas.h"

namespace overspill {
namespace {

using Dense = std::vector<float>;  // in the order of the four indices

uint64_t count(const FakeTensor& tensor) {
  uint64_t product = 1;
  for (const int64_t extent : tensor.extents) product *= static_cast<uint64_t>(extent);
  return product;
}

/// From the first to the last, with the gaps between them.
uint64_t elements_spanned(const FakeTensor& tensor) {
  uint64_t size = 1;
  for (int axis = 0; axis < 4; ++axis) {
    size += static_cast<uint64_t>((tensor.extents[axis] - 1) * tensor.strides[axis]);
  }
  return size;
}

/// Calls f(dense index, offset by strides) for all elements.
template <class F>
void each(const FakeExtents& extents, const FakeExtents& strides, const F& f) {
  uint64_t index = 0;
  for (int64_t i = 0; i < extents[0]; ++i) {
    for (int64_t j = 0; j < extents[1]; ++j) {
      for (int64_t k = 0; k < extents[2]; ++k) {
        const int64_t at = i * strides[0] + j * strides[1] + k * strides[2];
        for (int64_t l = 0; l < extents[3]; ++l) f(index++, at + l * strides[3]);
      }
    }
  }
}

/// The strides with which a dense tensor of extents `small` is read over those of `large`: 0 where
/// it is repeated. A group of heads that shares one is given by `group`.
struct Broadcast {
  Broadcast(const FakeExtents& small, const FakeExtents& large) {
    int64_t stride = 1;
    for (int axis = 3; axis >= 0; --axis) {
      group[axis] = std::max<int64_t>(1, large[axis] / small[axis]);
      strides[axis] = small[axis] == 1 ? 0 : stride;
      stride *= small[axis];
    }
  }
  int64_t at(int64_t i, int64_t j, int64_t k, int64_t l) const {
    return i / group[0] * strides[0] + j / group[1] * strides[1] + k / group[2] * strides[2] +
           l / group[3] * strides[3];
  }
  FakeExtents strides{}, group{};
};

/// Calls f(dense index of large, dense index of small).
template <class F>
void each_pair(const FakeExtents& large, const FakeExtents& small, const F& f) {
  const Broadcast to(small, large);
  uint64_t index = 0;
  for (int64_t i = 0; i < large[0]; ++i) {
    for (int64_t j = 0; j < large[1]; ++j) {
      for (int64_t k = 0; k < large[2]; ++k) {
        for (int64_t l = 0; l < large[3]; ++l) {
          f(index++, static_cast<uint64_t>(to.at(i, j, k, l)));
        }
      }
    }
  }
}

class Run {
 public:
  explicit Run(const FakeArguments& arguments) : arguments_(arguments) {}

  void operator()(const FakeOperation& operation) {
    switch (operation.kind) {
      case FakeKind::matmul: return matmul(operation);
      case FakeKind::reduction: return reduce(operation);
      case FakeKind::reshape: return reshape(operation);
      case FakeKind::pointwise: return pointwise(operation);
    }
  }

 private:
  Dense read(const FakeTensor& tensor) const {
    if (tensor.by_value) return Dense(1, arguments_.numbers.at(tensor.id));
    if (tensor.is_virtual) return between_.at(tensor.id);
    Dense values(count(tensor));
    const void* const memory = arguments_.memory.at(tensor.id);
    each(tensor.extents, tensor.strides,
         [&](uint64_t index, int64_t at) { values[index] = element(memory, at, tensor.type); });
    return values;
  }

  static float element(const void* memory, int64_t at, cudnnDataType_t type) {
    if (type == CUDNN_DATA_BFLOAT16) return bf16_to_float(static_cast<const uint16_t*>(memory)[at]);
    if (type == CUDNN_DATA_INT32)
      return static_cast<float>(static_cast<const int32_t*>(memory)[at]);
    return static_cast<const float*>(memory)[at];
  }

  void write(const FakeTensor& tensor, Dense values) {
    const bool bf16 = tensor.type == CUDNN_DATA_BFLOAT16;
    if (tensor.is_virtual) {
      if (bf16) {
        for (float& value : values) value = bf16_to_float(float_to_bf16(value));
      }
      between_[tensor.id] = std::move(values);
      return;
    }
    void* const memory = arguments_.memory.at(tensor.id);
    each(tensor.extents, tensor.strides, [&](uint64_t index, int64_t at) {
      if (bf16) {
        static_cast<uint16_t*>(memory)[at] = float_to_bf16(values[index]);
      } else {
        static_cast<float*>(memory)[at] = values[index];
      }
    });
  }

  void matmul(const FakeOperation& operation) {
    const FakeTensor &a = operation.x, &b = *operation.b, &c = operation.y;
    const Dense from_a = read(a), from_b = read(b);
    Dense to(count(c));
    const auto m = static_cast<uint64_t>(c.extents[2]), n = static_cast<uint64_t>(c.extents[3]);
    const auto k = static_cast<uint64_t>(a.extents[3]);
    const Broadcast in_a(a.extents, c.extents), in_b(b.extents, c.extents);
    for (int64_t i = 0; i < c.extents[0]; ++i) {
      for (int64_t j = 0; j < c.extents[1]; ++j) {
        const float* const left = from_a.data() + in_a.at(i, j, 0, 0);
        const float* const right = from_b.data() + in_b.at(i, j, 0, 0);
        float* const product = to.data() + static_cast<uint64_t>(i * c.extents[1] + j) * m * n;
        host::gemm(CblasNoTrans, CblasNoTrans, m, n, k, 1.0f, left, k, right, n, 0.0f, product, n);
      }
    }
    write(c, std::move(to));
  }

  void reduce(const FakeOperation& operation) {
    const Dense from = read(operation.x);
    const bool maximum = operation.reduction == CUDNN_REDUCE_TENSOR_MAX;
    Dense to(count(operation.y), maximum ? -std::numeric_limits<float>::infinity() : 0.0f);
    each_pair(operation.x.extents, operation.y.extents, [&](uint64_t x, uint64_t y) {
      to[y] = maximum ? std::max(to[y], from[x]) : to[y] + from[x];
    });
    write(operation.y, std::move(to));
  }

  /// The same memory with other extents and strides.
  void reshape(const FakeOperation& operation) {
    const Dense from = read(operation.x);
    Dense memory(elements_spanned(operation.x)), to(count(operation.y));
    each(operation.x.extents, operation.x.strides,
         [&](uint64_t index, int64_t at) { memory[static_cast<uint64_t>(at)] = from[index]; });
    each(operation.y.extents, operation.y.strides,
         [&](uint64_t index, int64_t at) { to[index] = memory.at(static_cast<uint64_t>(at)); });
    write(operation.y, std::move(to));
  }

  void generate_index(const FakeOperation& operation) {
    Dense to(count(operation.y));
    FakeExtents strides{};
    strides[static_cast<size_t>(operation.axis)] = 1;
    each(operation.y.extents, strides,
         [&](uint64_t index, int64_t at) { to[index] = static_cast<float>(at); });
    write(operation.y, std::move(to));
  }

  void pointwise(const FakeOperation& operation) {
    if (operation.mode == CUDNN_POINTWISE_GEN_INDEX) return generate_index(operation);
    const FakeExtents& extents = operation.y.extents;
    Dense to = spread(read(operation.x), operation.x.extents, extents);
    const Dense b = operation.b ? read(*operation.b) : Dense();
    const Dense mask = operation.mask ? read(*operation.mask) : Dense();
    each_pair(extents, operation.b ? operation.b->extents : extents,
              [&](uint64_t y, uint64_t other) {
                const float right = b.empty() ? 0.0f : b[other];
                to[y] = apply(operation.mode, to[y], right, mask.empty() || mask[y] != 0.0f);
              });
    write(operation.y, std::move(to));
  }

  static Dense spread(Dense values, const FakeExtents& from, const FakeExtents& to) {
    if (from == to) return values;
    Dense spread;
    each_pair(to, from, [&](uint64_t, uint64_t at) { spread.push_back(values[at]); });
    return spread;
  }

  static float apply(cudnnPointwiseMode_t mode, float x, float b, bool chosen) {
    switch (mode) {
      case CUDNN_POINTWISE_ADD: return x + b;
      case CUDNN_POINTWISE_SUB: return x - b;
      case CUDNN_POINTWISE_MUL: return x * b;
      case CUDNN_POINTWISE_DIV: return x / b;
      case CUDNN_POINTWISE_EXP: return std::exp(x);
      case CUDNN_POINTWISE_LOG: return std::log(x);
      case CUDNN_POINTWISE_IDENTITY: return x;
      case CUDNN_POINTWISE_CMP_GE: return x >= b ? 1.0f : 0.0f;
      case CUDNN_POINTWISE_CMP_GT: return x > b ? 1.0f : 0.0f;
      case CUDNN_POINTWISE_CMP_LT: return x < b ? 1.0f : 0.0f;
      case CUDNN_POINTWISE_BINARY_SELECT: return chosen ? x : b;
      default: CHECK(false); return 0.0f;
    }
  }

  const FakeArguments& arguments_;
  std::map<int64_t, Dense> between_;
};

bool divides(const FakeExtents& small, const FakeExtents& large, int axes) {
  for (int axis = 0; axis < axes; ++axis) {
    if (small[axis] < 1 || large[axis] % small[axis] != 0) return false;
  }
  return true;
}

std::string wrong_in_matmul(const FakeOperation& operation) {
  const FakeExtents &a = operation.x.extents, &b = operation.b->extents, &c = operation.y.extents;
  if (a[3] != b[2] || a[2] != c[2] || b[3] != c[3]) return "matrices that do not fit each other";
  if (!divides(a, c, 2) || !divides(b, c, 2)) return "batches of matrices that do not fit";
  return operation.x.type == operation.b->type || operation.x.type == CUDNN_DATA_FLOAT ||
                 operation.b->type == CUDNN_DATA_FLOAT
             ? ""
             : "a product of two types";
}

std::string wrong_in_pointwise(const FakeOperation& operation) {
  static const std::set<cudnnPointwiseMode_t> kOne = {CUDNN_POINTWISE_EXP, CUDNN_POINTWISE_LOG,
                                                      CUDNN_POINTWISE_IDENTITY,
                                                      CUDNN_POINTWISE_GEN_INDEX};
  static const std::set<cudnnPointwiseMode_t> kTwo = {
      CUDNN_POINTWISE_ADD,    CUDNN_POINTWISE_SUB,          CUDNN_POINTWISE_MUL,
      CUDNN_POINTWISE_DIV,    CUDNN_POINTWISE_CMP_GE,       CUDNN_POINTWISE_CMP_GT,
      CUDNN_POINTWISE_CMP_LT, CUDNN_POINTWISE_BINARY_SELECT};
  if (!kOne.contains(operation.mode) && !kTwo.contains(operation.mode)) return "an unknown mode";
  if (kTwo.contains(operation.mode) != operation.b.has_value()) return "a wrong number of operands";
  const bool selects = operation.mode == CUDNN_POINTWISE_BINARY_SELECT;
  if (selects != operation.mask.has_value()) return "a select and its mask must come together";
  if (selects && (operation.mask->type != CUDNN_DATA_BOOLEAN ||
                  operation.mask->extents != operation.y.extents)) {
    return "a mask that is not boolean or has other extents";
  }
  if (operation.mode == CUDNN_POINTWISE_GEN_INDEX && (operation.axis < 0 || operation.axis > 3)) {
    return "an index of no axis";
  }
  if (!divides(operation.x.extents, operation.y.extents, 4) ||
      (operation.b && !divides(operation.b->extents, operation.y.extents, 4))) {
    return "operands that cannot be repeated to the result's extents";
  }
  return "";
}

std::string wrong_in_reshape(const FakeOperation& operation) {
  return count(operation.x) == count(operation.y) ? "" : "a reshape to another size";
}

}  // namespace

std::string wrong_in(const FakeOperation& operation) {
  switch (operation.kind) {
    case FakeKind::matmul: return wrong_in_matmul(operation);
    case FakeKind::reduction:
      if (operation.reduction != CUDNN_REDUCE_TENSOR_ADD &&
          operation.reduction != CUDNN_REDUCE_TENSOR_MAX) {
        return "an unknown reduction";
      }
      return divides(operation.y.extents, operation.x.extents, 4) ? "" : "a reduction that grows";
    case FakeKind::reshape: return wrong_in_reshape(operation);
    case FakeKind::pointwise: return wrong_in_pointwise(operation);
  }
  return "an unknown operation";
}

std::string wrong_in(const FakeProgram& program) {
  if (program.empty()) return "no operations";
  std::map<int64_t, FakeTensor> tensors;
  std::set<int64_t> written;
  for (const FakeOperation& operation : program) {
    for (const FakeTensor* tensor :
         {&operation.x, &operation.y, operation.b ? &*operation.b : nullptr,
          operation.mask ? &*operation.mask : nullptr}) {
      if (!tensor) continue;
      const FakeTensor& known = tensors.try_emplace(tensor->id, *tensor).first->second;
      if (!(known == *tensor)) return "two tensors with id " + std::to_string(tensor->id);
      if (tensor != &operation.y && tensor->is_virtual && !written.contains(tensor->id)) {
        return "tensor " + std::to_string(tensor->id) + " is read before it is written";
      }
    }
    if (operation.y.by_value || !written.insert(operation.y.id).second) {
      return "tensor " + std::to_string(operation.y.id) + " is written twice";
    }
  }
  return "";
}

bool uses_memory(const FakeProgram& program, const FakeArguments& arguments, const void* memory,
                 uint64_t bytes) {
  const auto from = reinterpret_cast<uintptr_t>(memory);
  for (const FakeOperation& operation : program) {
    for (const FakeTensor* tensor :
         {&operation.x, &operation.y, operation.b ? &*operation.b : nullptr}) {
      if (!tensor || !arguments.memory.contains(tensor->id)) continue;
      const uint64_t size =
          elements_spanned(*tensor) * (tensor->type == CUDNN_DATA_BFLOAT16 ? 2 : 4);
      const auto at = reinterpret_cast<uintptr_t>(arguments.memory.at(tensor->id));
      if (at < from + bytes && from < at + size) return true;
    }
  }
  return false;
}

void run_fake_program(const FakeProgram& program, const FakeArguments& arguments) {
  Run run(arguments);
  for (const FakeOperation& operation : program) run(operation);
}

}  // namespace overspill
