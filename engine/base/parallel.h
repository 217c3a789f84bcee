// The one pool of CPU threads (oneTBB). Work is cut into indexed tasks by the caller, never by the
// number of threads, so that results do not depend on it. Any thread may call; calls may nest.
#pragma once

#include <cstdint>
#include <functional>

namespace overspill {

/// Threads that may run tasks, the caller included. Set once, before the first parallel_for.
void set_parallel_threads(uint32_t threads);
uint32_t parallel_threads();
/// Inside a task: which of the pool's parallel_threads() places runs it, for scratch memory.
uint32_t parallel_slot();

/// Runs task(i) for every i in [0, count) and returns when all are done.
void parallel_for(uint64_t count, const std::function<void(uint64_t)>& task);

/// Runs task(begin, end) over [0, size) in blocks of `block` elements (the last one shorter).
void parallel_blocks(uint64_t size, uint64_t block,
                     const std::function<void(uint64_t, uint64_t)>& task);

}  // namespace overspill
