// A tensor of the GPU in tests: bf16 or float32 of exact size, aligned to 256 bytes, NaN until
// written.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "engine/base/dtype.h"
#include "tests/emulation/test_memory.h"

namespace overspill {

class TestTensor {
 public:
  TestTensor(DType type, uint64_t size)
      : type_(type), size_(size), memory_(test::allocate_shared(bytes())) {
    poison();
  }
  static TestTensor random(DType type, uint64_t size, uint32_t seed, float scale = 1.0f) {
    TestTensor tensor(type, size);
    std::mt19937 generator(seed);
    std::normal_distribution<float> normal(0.0f, scale);
    for (uint64_t i = 0; i < size; ++i) tensor.set(i, normal(generator));
    return tensor;
  }

  void poison() {
    test::finish_kernels();
    for (uint64_t i = 0; i < size_; ++i) set(i, std::numeric_limits<float>::quiet_NaN());
  }
  void set(uint64_t i, float value) {
    if (type_ == DType::f32) {
      static_cast<float*>(memory_.get())[i] = value;
    } else {
      static_cast<uint16_t*>(memory_.get())[i] = float_to_bf16(value);
    }
  }
  double operator[](uint64_t i) const {
    test::finish_kernels();
    return type_ == DType::f32 ? static_cast<const float*>(memory_.get())[i]
                               : bf16_to_float(static_cast<const uint16_t*>(memory_.get())[i]);
  }
  void* get() const {
    test::give_to_kernels();
    return memory_.get();
  }
  float* floats() const { return static_cast<float*>(get()); }
  uint64_t size() const { return size_; }
  uint64_t bytes() const { return size_ * dtype_bytes(type_); }
  bool same_bits(const TestTensor& other) const {
    test::finish_kernels();
    return bytes() == other.bytes() &&
           std::memcmp(memory_.get(), other.memory_.get(), bytes()) == 0;
  }

 private:
  struct Free {
    void operator()(void* memory) const { test::free_shared(memory); }
  };
  DType type_;
  uint64_t size_;
  std::unique_ptr<void, Free> memory_;
};

}  // namespace overspill
