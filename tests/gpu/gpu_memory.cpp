// The tests' memory on a real GPU: managed by CUDA, so that kernels and the host both reach it.
// What the emulation says of kernels, CUDA says here.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstring>
#include <new>

#include "tests/emulation/emulation.h"
#include "tests/emulation/kernel_fixture.h"
#include "tests/emulation/test_memory.h"

namespace overspill {
namespace test {
namespace {

constexpr std::byte kCanary{0xa5};
constexpr size_t kFront = 256;  // bytes before an array's start, at least

bool given = false;  // to kernels, since the last wait

void check(cudaError_t status, const char* doing) {
  if (status == cudaSuccess) return;
  // Every later call would fail in the same way.
  std::fprintf(stderr, "CUDA cannot %s: %s: %s\n", doing, cudaGetErrorName(status),
               cudaGetErrorString(status));
  std::abort();
}

std::byte* allocate(size_t bytes) {
  void* memory = nullptr;
  check(cudaMallocManaged(&memory, bytes, cudaMemAttachGlobal), "allocate memory for a test");
  return static_cast<std::byte*>(memory);
}

}  // namespace

void finish_kernels() {
  if (!std::exchange(given, false)) return;
  check(cudaDeviceSynchronize(), "finish the kernels of a test");
}
void give_to_kernels() { given = true; }

void* allocate_shared(size_t bytes) { return allocate(std::max<size_t>(bytes, 1)); }
void free_shared(void* memory) {
  finish_kernels();
  cudaFree(memory);
}

GuardedMemory::GuardedMemory(size_t bytes, size_t misalign)
    : mapped_(kFront + misalign + bytes), bytes_(bytes) {
  mapping_ = allocate(mapped_);
  start_ = mapping_ + kFront + misalign;
  std::memset(mapping_, static_cast<int>(kCanary), kFront + misalign);
}

GuardedMemory::~GuardedMemory() {
  given = true;
  finish_kernels();
  size_t changed = 0;
  for (const std::byte* at = mapping_; at < start_; ++at) changed += *at != kCanary;
  EXPECT_EQ(changed, 0u) << "bytes written before an array of " << bytes_;
  cudaFree(mapping_);
}

}  // namespace test

namespace emulation {

void set_seed(uint64_t) {}  // a GPU has schedules of its own
std::vector<std::string> take_errors() {
  test::give_to_kernels();
  test::finish_kernels();
  return {};
}

}  // namespace emulation
}  // namespace overspill
