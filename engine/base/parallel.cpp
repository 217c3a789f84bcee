// parallel_for on one tbb::task_arena. ThreadSanitizer cannot see how the distribution's oneTBB
// synchronises, so its build uses plain threads and checks the tasks themselves.
#include "engine/base/parallel.h"

#include <algorithm>
#include <mutex>
#include <thread>

#include "engine/base/error.h"

#if defined(__SANITIZE_THREAD__)
#include <atomic>
#else
#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>
#endif

namespace overspill {
namespace {

std::mutex threads_mutex;
uint32_t threads = 0;  // 0: not chosen yet

#if defined(__SANITIZE_THREAD__)

thread_local uint32_t own_slot = 0;

void run_tasks(uint64_t count, const std::function<void(uint64_t)>& task) {
  std::atomic<uint64_t> next{0};
  const auto work = [&] {
    for (uint64_t i = next++; i < count; i = next++) task(i);
  };
  std::thread other([&] {
    own_slot = 1;
    work();
  });
  work();
  other.join();
}

uint32_t current_slot() { return own_slot; }

#else

tbb::task_arena& arena() {
  static tbb::task_arena instance(static_cast<int>(parallel_threads()), 1);
  return instance;
}

void run_tasks(uint64_t count, const std::function<void(uint64_t)>& task) {
  arena().execute([&] { tbb::parallel_for(uint64_t{0}, count, task, tbb::simple_partitioner()); });
}

uint32_t current_slot() {
  const int slot = tbb::this_task_arena::current_thread_index();
  return slot < 0 ? 0 : static_cast<uint32_t>(slot);
}

#endif

}  // namespace

void set_parallel_threads(uint32_t count) {
  const std::lock_guard lock(threads_mutex);
  CHECK(count > 0);
  CHECK(threads == 0 || threads == count);
  threads = count;
}

uint32_t parallel_threads() {
  static const uint32_t chosen = [] {
    const std::lock_guard lock(threads_mutex);
    if (threads == 0) threads = std::max(1u, std::thread::hardware_concurrency());
    return threads;
  }();
  return chosen;
}

uint32_t parallel_slot() { return current_slot(); }

void parallel_for(uint64_t count, const std::function<void(uint64_t)>& task) {
  if (count == 0) return;
  if (count == 1 || parallel_threads() == 1) {
    for (uint64_t i = 0; i < count; ++i) task(i);
    return;
  }
  run_tasks(count, task);
}

void parallel_blocks(uint64_t size, uint64_t block,
                     const std::function<void(uint64_t, uint64_t)>& task) {
  parallel_for((size + block - 1) / block,
               [&](uint64_t i) { task(i * block, std::min(size, (i + 1) * block)); });
}

}  // namespace overspill
