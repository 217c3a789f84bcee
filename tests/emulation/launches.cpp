// Launches: checked as CUDA checks them, run block after block in an order of the seed's. Blocks
// and their fibers are kept for later launches.
#include "tests/emulation/launches.h"

#include <atomic>
#include <memory>
#include <mutex>
#include <numeric>
#include <utility>

#include "engine/base/cuda_launch.h"
#include "engine/base/random.h"
#include "tests/emulation/block.h"
#include "tests/emulation/emulation.h"

namespace overspill::emulation {
namespace {

std::atomic<uint64_t> schedule_seed{0}, launched{0};
std::atomic<Enqueue> enqueue{nullptr};
char launch_object, end_object;

struct Errors {
  std::mutex mutex;
  std::vector<std::string> texts;
};
Errors& errors() {
  static Errors all;
  return all;
}

/// Blocks at rest. A launch takes two, so that under ThreadSanitizer neighbouring blocks are
/// different threads and a race between them is seen.
struct Pool {
  std::mutex mutex;
  std::vector<std::unique_ptr<Block>> blocks;
};
Pool& pool() {
  static auto* const all = new Pool;  // streams may run at the program's end
  return *all;
}
std::unique_ptr<Block> take_block() {
  const std::lock_guard lock(pool().mutex);
  if (pool().blocks.empty()) return std::make_unique<Block>();
  std::unique_ptr<Block> block = std::move(pool().blocks.back());
  pool().blocks.pop_back();
  return block;
}
void give_back(std::unique_ptr<Block> block) {
  const std::lock_guard lock(pool().mutex);
  pool().blocks.push_back(std::move(block));
}

void run(const Launch& launch, uint64_t seed) {
  const uint64_t blocks = uint64_t{launch.grid.x} * launch.grid.y * launch.grid.z;
  std::vector<uint64_t> order(blocks);
  std::iota(order.begin(), order.end(), uint64_t{0});
  for (uint64_t i = blocks; seed != 0 && i > 1; --i) {
    std::swap(order[i - 1], order[random_below(seed, i, i)]);
  }
  std::unique_ptr<Block> block = take_block(), other = take_block();
  happens_before(&launch_object);
  for (const uint64_t i : order) {
    const uint3 index{static_cast<unsigned>(i % launch.grid.x),
                      static_cast<unsigned>(i / launch.grid.x % launch.grid.y),
                      static_cast<unsigned>(i / launch.grid.x / launch.grid.y)};
    block->run(launch, index, seed == 0 ? 0 : random_bits(seed, i) | 1);
    block.swap(other);
  }
  happens_after(&end_object);
  give_back(std::move(other));
  give_back(std::move(block));
}

struct Task {
  Launch launch;
  uint64_t seed;
};
void run_task(void* argument) {
  const std::unique_ptr<Task> task(static_cast<Task*>(argument));
  run(task->launch, task->seed);
}

/// CUDA's limits on every architecture that is built for.
const char* refusal(const Launch& launch) {
  const dim3 &grid = launch.grid, &block = launch.block;
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  if (threads == 0 || threads > kMaxThreads) return "0 or more than 1024 threads in a block";
  if (threads % kLanes != 0) return "a block's threads are no multiple of 32";
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return "no blocks";
  if (grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535) return "the grid is too large";
  if (launch.shared_bytes > kSharedLimit) return "too much shared memory";
  return nullptr;
}

}  // namespace

void set_seed(uint64_t seed) { schedule_seed = seed; }
uint64_t launches() { return launched; }
void set_enqueue(Enqueue function) { enqueue = function; }

std::vector<std::string> take_errors() {
  const std::lock_guard lock(errors().mutex);
  return std::exchange(errors().texts, {});
}

void add_error(std::string what) {
  const std::lock_guard lock(errors().mutex);
  errors().texts.push_back(std::move(what));
}

void* launch_ordering() { return &launch_object; }
void* end_ordering() { return &end_object; }

void launch(const char* kernel, cudaStream_t stream, Launch launch) {
  if (const char* reason = refusal(launch)) cuda::launch_failed(kernel, reason);
  const uint64_t number = launched++;
  const uint64_t seed = schedule_seed == 0 ? 0 : random_bits(schedule_seed, number) | 1;
  auto task = std::make_unique<Task>(Task{std::move(launch), seed});
  if (const Enqueue put = enqueue) return put(stream, run_task, task.release());
  run_task(task.release());
}

}  // namespace overspill::emulation
