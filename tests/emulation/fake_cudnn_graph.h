// Operation graphs as the fake cuDNN executes them: on host memory, in float32.
#pragma once

#include <cudnn_graph.h>

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace overspill {

using FakeExtents = std::array<int64_t, 4>;

struct FakeTensor {
  int64_t id = 0;
  cudnnDataType_t type{};
  FakeExtents extents{}, strides{};
  bool is_virtual = false, by_value = false;
  int64_t alignment = 0;
  bool operator==(const FakeTensor&) const = default;
};

enum class FakeKind { matmul, reduction, reshape, pointwise };

struct FakeOperation {
  FakeKind kind{};
  cudnnReduceTensorOp_t reduction{};
  cudnnPointwiseMode_t mode{};
  int64_t axis = -1;
  FakeTensor x, y;  ///< a product's a and c
  std::optional<FakeTensor> b, mask;
};

using FakeProgram = std::vector<FakeOperation>;

/// Empty, or what is wrong with one operation, or with the order of all.
std::string wrong_in(const FakeOperation& operation);
std::string wrong_in(const FakeProgram& program);

/// Memory by a tensor's id; values of numbers.
struct FakeArguments {
  std::map<int64_t, void*> memory;
  std::map<int64_t, float> numbers;
};

/// Whether a tensor of the program lies in this memory too.
bool uses_memory(const FakeProgram& program, const FakeArguments& arguments, const void* memory,
                 uint64_t bytes);

void run_fake_program(const FakeProgram& program, const FakeArguments& arguments);

}  // namespace overspill
