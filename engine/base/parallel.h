// The CPU threads of the process (oneTBB), in one group per NUMA node. Work is cut into indexed
// tasks by the caller, never by the number of threads or groups, so that results do not depend on
// them. Any thread may call; calls may nest.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace overspill {

/// Threads that work together.
struct ParallelGroup {
  std::vector<uint32_t> cpus{};  ///< they stay on these; empty: on any
  /// 0: one per CPU of the list, without one: of the process. Of several groups, each has two.
  uint32_t threads = 0;
};

/// Chooses the groups, at least one. Called while no task runs; a later call replaces them.
void set_parallel_groups(std::vector<ParallelGroup> groups);
/// One group that may run on any CPU, of so many threads, the caller included.
void set_parallel_threads(uint32_t threads);
/// Whether groups are chosen: by the calls above, or by a first use of the default, which is one
/// group of as many threads as the process has CPUs.
bool parallel_groups_chosen();

uint32_t parallel_group_count();
const ParallelGroup& parallel_group(uint32_t group);
/// Of all groups together.
uint32_t parallel_threads();
/// Inside a task: which of the parallel_threads() places runs it, for scratch memory.
uint32_t parallel_slot();

/// Runs task(i) for every i in [0, count) and returns when all are done. Each group takes one
/// contiguous range in proportion to its threads; a task's nested calls stay in its group. The
/// first exception of a task is thrown to the caller, when all tasks that had begun are done. An
/// only task runs in the caller itself, unless it is bound for a group.
void parallel_for(uint64_t count, const std::function<void(uint64_t)>& task);

/// Runs task(begin, end) over [0, size) in blocks of `block` elements (the last one shorter).
void parallel_blocks(uint64_t size, uint64_t block,
                     const std::function<void(uint64_t, uint64_t)>& task);

inline constexpr uint32_t kAllGroups = UINT32_MAX;

/// While it lives, calls of this thread run in that group only, whose threads are near the memory
/// they work on. kAllGroups changes nothing. Within one group, another must not be asked for.
class ParallelGroupScope {
 public:
  explicit ParallelGroupScope(uint32_t group);
  ~ParallelGroupScope();
  ParallelGroupScope(const ParallelGroupScope&) = delete;
  ParallelGroupScope& operator=(const ParallelGroupScope&) = delete;

 private:
  uint32_t outer_;
};

}  // namespace overspill
