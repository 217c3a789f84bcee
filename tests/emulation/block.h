// One block of CUDA threads at a time, each a fiber: the scheduler behind kernel_emulation.h. A
// thread runs until it waits at a barrier or exchange or ends. Used by one OS thread at a time.
#pragma once

#include <cuda_runtime_api.h>
#include <vector_types.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "tests/emulation/fiber.h"

namespace overspill::emulation {

inline constexpr unsigned kLanes = 32, kMaxThreads = 1024, kMaxWarps = kMaxThreads / kLanes;
/// What every architecture that is built for allows without asking (sm_89 and sm_120: 99 KiB
/// after).
inline constexpr size_t kSharedLimit = 48 * 1024;

struct Launch {
  dim3 grid, block;
  size_t shared_bytes;
  std::function<void()> body;  ///< the kernel's call
};

/// Where in the kernel's source a thread waits.
struct CallSite {
  const char* file = "";
  int line = 0;
};

class Block {
 public:
  Block();
  ~Block();
  /// Runs one block to its end.
  void run(const Launch& launch, const uint3& index, uint64_t seed);

  // What kernels call, in a thread.
  void barrier(const CallSite& site);
  void warp_barrier(const CallSite& site);
  /// The value of the lane with this number xor `mask`.
  uint64_t exchange(uint64_t value, unsigned mask, const CallSite& site);
  uint32_t ballot(bool condition, const CallSite& site);
  /// The array of this key, made at its first use in a block and filled with NaN.
  std::byte* shared(const void* key, size_t bytes);
  std::byte* dynamic_shared() { return arena_; }

  uint3 thread_index, block_index;  ///< of the running thread
  dim3 block_extents, grid_extents;

 private:
  enum class State : uint8_t { ready, at_block_barrier, at_warp_barrier, done };
  struct Thread {
    State state = State::ready;
    bool started = false;
    unsigned fiber = 0;
    CallSite site;
  };
  struct Warp {
    uint32_t ready = 0;  ///< a bit per lane that can run
    uint32_t arrived = 0, done = 0;
    unsigned generation = 0;
    std::array<uint64_t, kLanes> slots[2];  ///< of exchanges, in turns
  };
  struct SharedArray {
    const void* key;
    size_t offset, bytes;
  };

  static void thread_main();
  void resume(unsigned thread);
  int next_thread();
  void wait(State state, const CallSite& site);
  void wait_for_warp(const CallSite& site, bool memory_order);
  void release_block();
  void thread_done();
  void set_state(unsigned thread, State state);
  void shuffle_warps();
  uint64_t random(uint64_t bound);
  void start(const Launch& launch, const uint3& index, uint64_t seed);
  void check_redzones();
  void report(const std::string& what, const CallSite& site) const;
  [[noreturn]] void report_deadlock() const;

  const Launch* launch_ = nullptr;
  unsigned threads_ = 0, done_ = 0, waiting_ = 0, barriers_ = 0, current_ = 0;
  int barrier_line_ = 0;  ///< where the first of those that wait does
  std::array<Thread, kMaxThreads> thread_;
  std::array<Warp, kMaxWarps> warps_;
  std::array<unsigned, kMaxWarps> order_;  ///< of warps by priority
  uint64_t seed_ = 0, draws_ = 0;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::array<unsigned, kMaxThreads> idle_;  ///< fibers whose thread has ended
  unsigned idle_count_ = 0;
  FiberContext scheduler_;
  std::byte* arena_;
  size_t used_ = 0;
  std::vector<SharedArray> arrays_;
  char* orderings_ = nullptr;  ///< ThreadSanitizer's objects: of the block, then of each warp
};

/// The block that this OS thread runs.
Block& current_block();
/// Checks the launch as CUDA does, then runs or enqueues it.
void launch(const char* kernel, cudaStream_t stream, Launch launch);

}  // namespace overspill::emulation
