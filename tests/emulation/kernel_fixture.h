// What tests of kernels share: arrays that end where memory ends, values, and bounds of errors.
#pragma once

#include <cuda_bf16.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <vector>

#include "engine/base/random.h"
#include "tests/emulation/emulation.h"
#include "tests/emulation/test_memory.h"

namespace overspill::test {

using bf16 = __nv_bfloat16;
using Doubles = std::vector<double>;

/// Memory up to the last byte of which an inaccessible page lies; what is left in front of an
/// aligned start is checked at the end. AddressSanitizer guards that too. On a GPU what lies in
/// front is checked, and behind it compute-sanitizer guards.
class GuardedMemory {
 public:
  /// `misalign`: the start is so many bytes off a multiple of 16.
  explicit GuardedMemory(size_t bytes, size_t misalign = 0);
  ~GuardedMemory();
  GuardedMemory(const GuardedMemory&) = delete;
  GuardedMemory& operator=(const GuardedMemory&) = delete;
  std::byte* start() const { return start_; }

 private:
  std::byte* mapping_;
  size_t mapped_, bytes_;
  std::byte* start_;
};

/// An array on the device, all NaN (of integers: -1) at first.
template <class T>
class Array {
 public:
  explicit Array(size_t size, size_t misalign = 0)
      : memory_(size * sizeof(T), misalign), size_(size) {
    std::memset(static_cast<void*>(start()), 0xff, size * sizeof(T));
  }
  template <class Values>
  Array(const Values& values, size_t misalign) : Array(values.size(), misalign) {
    for (size_t i = 0; i < size_; ++i) start()[i] = static_cast<T>(values[i]);
  }
  /// For kernels, or for the host once all kernels have ended.
  T* data() const {
    finish_kernels();
    give_to_kernels();
    return start();
  }
  size_t size() const { return size_; }
  T& operator[](size_t i) const {
    finish_kernels();
    return start()[i];
  }
  void fill(double value) const {
    for (size_t i = 0; i < size_; ++i) (*this)[i] = static_cast<T>(static_cast<float>(value));
  }
  Doubles values() const {
    Doubles result;
    for (size_t i = 0; i < size_; ++i)
      result.push_back(static_cast<double>(static_cast<float>((*this)[i])));
    return result;
  }

 private:
  T* start() const { return reinterpret_cast<T*>(memory_.start()); }

  GuardedMemory memory_;
  size_t size_;
};

/// Standard normals times `scale`.
template <class T>
Array<T> normals(uint64_t key, size_t size, float scale = 1, size_t misalign = 0) {
  std::vector<float> values;
  for (size_t i = 0; i < size; ++i) values.push_back(scale * random_normal(key, i));
  return Array<T>(values, misalign);
}

/// Elements differ from the reference by at most `relative` of themselves, `of_largest` of the
/// largest, `absolute`, and half a unit in the last place of T when that is bf16.
struct Bound {
  double relative = 0, of_largest = 0, absolute = 0;
};
template <class T>
void expect_close(const Array<T>& got, const Doubles& want, const Bound& bound) {
  ASSERT_EQ(got.size(), want.size());
  const double rounding = sizeof(T) == 2 ? 0x1p-8 : 0;
  double largest = 0;
  for (const double value : want) largest = std::max(largest, std::abs(value));
  for (size_t i = 0; i < want.size(); ++i) {
    const double error = std::abs(static_cast<double>(static_cast<float>(got[i])) - want[i]);
    const double allowed = (bound.relative + rounding) * std::abs(want[i]) +
                           bound.of_largest * largest + bound.absolute;
    ASSERT_LE(error, allowed) << "element " << i << ": " << static_cast<float>(got[i]) << ", not "
                              << want[i];
  }
}

/// One run per seed of the emulation's schedule; what kernels did wrong fails the test.
class KernelTest : public testing::TestWithParam<uint64_t> {
 protected:
  void SetUp() override { emulation::set_seed(GetParam()); }
  void TearDown() override {
    for (const std::string& error : emulation::take_errors()) ADD_FAILURE() << error;
    emulation::set_seed(0);
  }
};
#define INSTANTIATE_SEEDS(Suite) INSTANTIATE_TEST_SUITE_P(Seeds, Suite, testing::Values(0, 1, 2, 3))

}  // namespace overspill::test
