// The emulation itself: it must see what a GPU does wrong silently.
#include "tests/emulation/emulation.h"

#include <gtest/gtest.h>

#include <set>

#include "engine/base/error.h"
#include "tests/emulation/kernel_emulation.h"
// The kernels' header comes after what it is translated to.
#include "engine/base/cuda_vector.h"

namespace overspill::cuda {
namespace {

constexpr int kThreads = 64;

__global__ void read_neighbour(const int* in, int* out) {
  OVERSPILL_SHARED(int, shared, [kThreads]);
  shared[threadIdx.x] = in[threadIdx.x];
  block_barrier();
  out[threadIdx.x] = shared[(threadIdx.x + 33) % kThreads];
}

__global__ void read_neighbour_too_early(const int* in, int* out) {
  OVERSPILL_SHARED(int, shared, [kThreads]);
  shared[threadIdx.x] = in[threadIdx.x];
  out[threadIdx.x] = shared[(threadIdx.x + 33) % kThreads];
}

__global__ void read_fresh_shared(float* out) {
  OVERSPILL_SHARED(float, shared, [kThreads]);
  out[threadIdx.x] = shared[threadIdx.x];
}

__global__ void write_beyond_dynamic() {
  OVERSPILL_DYNAMIC_SHARED(float, shared);
  volatile unsigned beyond = kThreads;
  if (threadIdx.x == 0) shared[beyond] = 1;
}

__global__ void different_barriers() {
  if (threadIdx.x < 32) {
    block_barrier();
  } else {
    block_barrier();
  }
}

__global__ void leave_early() {
  if (threadIdx.x == 3) return;
  block_barrier();
}

__global__ void half_a_warp() {
  if (threadIdx.x % kWarp < 16) warp_barrier();
  block_barrier();
}

__global__ void reduce(double* sums, float* maxima, unsigned* ballots) {
  sums[threadIdx.x] = block_sum<kThreads>(double(threadIdx.x));
  maxima[threadIdx.x] = block_max<kThreads>(-float(threadIdx.x));
  ballots[threadIdx.x] = ballot(threadIdx.x % 3 == 0);
}

__global__ void number_blocks(uint64_t* next, uint64_t* order) {
  if (threadIdx.x == 0) order[(*next)++] = blockIdx.x + 10 * blockIdx.y + 100 * blockIdx.z;
}

class Emulation : public testing::Test {
 protected:
  void TearDown() override {
    EXPECT_TRUE(emulation::take_errors().empty());
    emulation::set_seed(0);
  }
  int in[kThreads], out[kThreads];
};

TEST_F(Emulation, BarriersOrderSharedMemory) {
  for (int i = 0; i < kThreads; ++i) in[i] = 100 + i;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    emulation::set_seed(seed);
    OVERSPILL_LAUNCH(read_neighbour, 1, kThreads, 0, nullptr, in, out);
    for (int i = 0; i < kThreads; ++i) ASSERT_EQ(out[i], 100 + (i + 33) % kThreads);
  }
}

TEST_F(Emulation, MissingBarriersShow) {
  if (emulation::fibers_are_threads()) GTEST_SKIP() << "ThreadSanitizer reports the race itself";
  for (int i = 0; i < kThreads; ++i) in[i] = 100 + i;
  for (uint64_t seed = 0; seed < 4; ++seed) {
    emulation::set_seed(seed);
    OVERSPILL_LAUNCH(read_neighbour_too_early, 1, kThreads, 0, nullptr, in, out);
    int wrong = 0;
    for (int i = 0; i < kThreads; ++i) wrong += out[i] != 100 + (i + 33) % kThreads;
    EXPECT_GT(wrong, 0) << "seed " << seed;
  }
}

TEST_F(Emulation, SeedsDrawTheOrderOfBlocks) {
  if (emulation::fibers_are_threads()) GTEST_SKIP() << "ThreadSanitizer reports the race itself";
  std::set<std::vector<uint64_t>> orders;
  for (uint64_t seed = 0; seed < 4; ++seed) {
    emulation::set_seed(seed);
    std::vector<uint64_t> order(24);
    uint64_t next = 0;
    OVERSPILL_LAUNCH(number_blocks, dim3(2, 3, 4), 32, 0, nullptr, &next, order.data());
    orders.insert(order);
    std::ranges::sort(order);
    EXPECT_EQ(std::set(order.begin(), order.end()).size(), 24u);
    EXPECT_EQ(order.back(), 321u);
  }
  EXPECT_EQ(orders.size(), 4u);
}

TEST_F(Emulation, SharedMemoryStartsAsNan) {
  float values[kThreads] = {};
  OVERSPILL_LAUNCH(read_fresh_shared, 1, kThreads, 0, nullptr, values);
  for (const float value : values) EXPECT_TRUE(std::isnan(value));
}

#if !defined(__SANITIZE_ADDRESS__)  // which ends the program
TEST_F(Emulation, WritesBeyondSharedMemoryShow) {
  OVERSPILL_LAUNCH(write_beyond_dynamic, 1, kThreads, kThreads * 4, nullptr);
  const std::vector<std::string> errors = emulation::take_errors();
  ASSERT_EQ(errors.size(), 1u);
  EXPECT_NE(errors[0].find("a write beyond a shared array of 256 bytes"), std::string::npos);
}
#endif

TEST_F(Emulation, DifferentBarriersShow) {
  OVERSPILL_LAUNCH(different_barriers, 1, kThreads, 0, nullptr);
  const std::vector<std::string> errors = emulation::take_errors();
  ASSERT_FALSE(errors.empty());
  EXPECT_NE(errors[0].find("threads wait at different barriers"), std::string::npos);
}

TEST_F(Emulation, LeavingBeforeABarrierShows) {
  OVERSPILL_LAUNCH(leave_early, 1, kThreads, 0, nullptr);
  const std::vector<std::string> errors = emulation::take_errors();
  ASSERT_FALSE(errors.empty());
  EXPECT_NE(errors[0].find("a barrier after threads of the block have ended"), std::string::npos);
}

TEST_F(Emulation, DeadlocksEndTheProgram) {
  if (emulation::fibers_are_threads()) GTEST_SKIP() << "death tests fork";
  EXPECT_DEATH(OVERSPILL_LAUNCH(half_a_warp, 1, kThreads, 0, nullptr), "deadlock: thread 0");
}

TEST_F(Emulation, BlocksAgreeOnReductions) {
  for (uint64_t seed = 0; seed < 4; ++seed) {
    emulation::set_seed(seed);
    double sums[kThreads];
    float maxima[kThreads];
    unsigned ballots[kThreads];
    OVERSPILL_LAUNCH(reduce, 1, kThreads, 0, nullptr, sums, maxima, ballots);
    for (int i = 0; i < kThreads; ++i) {
      EXPECT_EQ(sums[i], 63 * 32);
      EXPECT_EQ(maxima[i], 0);
      EXPECT_EQ(ballots[i], i < 32 ? 0x49249249u : 0x92492492u);
    }
  }
}

TEST_F(Emulation, LaunchesAreCheckedAsCudaDoes) {
  const auto refused = [](dim3 grid, dim3 threads, size_t shared) {
    try {
      OVERSPILL_LAUNCH(write_beyond_dynamic, grid, threads, shared, nullptr);
    } catch (const Error& error) {
      return std::string(error.what()).starts_with("start kernel write_beyond_dynamic: ");
    }
    return false;
  };
  EXPECT_TRUE(refused(0, 32, 1024));
  EXPECT_TRUE(refused(1, 0, 1024));
  EXPECT_TRUE(refused(1, 1056, 1024));
  EXPECT_TRUE(refused(1, 40, 1024));
  EXPECT_TRUE(refused(dim3(1, 65536), 32, 1024));
  EXPECT_TRUE(refused(1, 32, 48 * 1024 + 1));
  EXPECT_FALSE(refused(1, 32, 48 * 1024));
}

}  // namespace
}  // namespace overspill::cuda
