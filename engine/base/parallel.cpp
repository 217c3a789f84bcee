// One tbb::task_arena per group, its threads kept on the group's CPUs by an observer. A call over
// several groups hands each its range and works in the first itself. ThreadSanitizer cannot see how
// the distribution's oneTBB synchronises, so its build uses plain threads and checks the tasks.
#include "engine/base/parallel.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "engine/base/error.h"
#include "engine/base/thread.h"

#if !defined(__SANITIZE_THREAD__)
#include <tbb/global_control.h>
#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>
#include <tbb/task_scheduler_observer.h>

#include <deque>
#endif

namespace overspill {
namespace {

using Task = std::function<void(uint64_t)>;

struct Range {
  uint64_t begin, end;
};

/// The group that this thread's calls stay in: its task's, or its scope's.
thread_local uint32_t own_group = kAllGroups;

#if defined(__SANITIZE_THREAD__)

thread_local uint32_t own_index = 0;

class Workers {
 public:
  Workers(const ParallelGroup& group, bool) : group_(group) {}
  /// In the caller and one other thread.
  void run(Range range, const Task& task) {
    const CpuBinding binding(group_.cpus);
    std::atomic<uint64_t> next{range.begin};
    const auto work = [&](uint32_t index) {
      const uint32_t outer = std::exchange(own_index, index);
      for (uint64_t i = next++; i < range.end; i = next++) task(i);
      own_index = outer;
    };
    std::thread other;
    if (group_.threads > 1) other = std::thread(work, 1);
    work(0);
    if (other.joinable()) other.join();
  }
  void start(std::function<void()> work) { std::thread(std::move(work)).detach(); }

 private:
  const ParallelGroup& group_;
};

struct ThreadLimit {
  explicit ThreadLimit(uint32_t) {}
};

uint32_t current_index() { return own_index; }

#else

/// Keeps the threads of an arena on CPUs while they are in it.
class Pin : public tbb::task_scheduler_observer {
 public:
  Pin(tbb::task_arena& arena, const std::vector<uint32_t>& cpus)
      : task_scheduler_observer(arena), cpus_(cpus) {
    observe(true);
  }
  ~Pin() override { observe(false); }
  void on_scheduler_entry(bool) override { bindings().emplace_back(cpus_); }
  void on_scheduler_exit(bool) override {
    if (!bindings().empty()) bindings().pop_back();
  }

 private:
  /// Of the calling thread; a thread in a task of one arena may enter another.
  static std::deque<CpuBinding>& bindings() {
    thread_local std::deque<CpuBinding> stack;
    return stack;
  }
  const std::vector<uint32_t>& cpus_;
};

class Workers {
 public:
  /// An only group keeps a place for its caller. Of several, each must fill its CPUs when the
  /// caller is elsewhere.
  Workers(const ParallelGroup& group, bool only)
      : arena_(static_cast<int>(group.threads), only ? 1 : 0) {
    if (!group.cpus.empty()) pin_.emplace(arena_, group.cpus);
  }
  void run(Range range, const Task& task) {
    arena_.execute(
        [&] { tbb::parallel_for(range.begin, range.end, task, tbb::simple_partitioner()); });
  }
  void start(std::function<void()> work) { arena_.enqueue(std::move(work)); }

 private:
  tbb::task_arena arena_;
  std::optional<Pin> pin_;
};

struct ThreadLimit {
  explicit ThreadLimit(uint32_t threads)
      : control_(tbb::global_control::max_allowed_parallelism, threads) {}
  tbb::global_control control_;
};

uint32_t current_index() {
  const int index = tbb::this_task_arena::current_thread_index();
  return index < 0 ? 0 : static_cast<uint32_t>(index);
}

#endif

struct Group {
  Group(ParallelGroup g, uint32_t slot, bool only)
      : spec(std::move(g)), first_slot(slot), workers(spec, only) {}
  const ParallelGroup spec;
  const uint32_t first_slot;
  Workers workers;
};

struct Pool {
  std::vector<std::unique_ptr<Group>> groups;
  uint32_t threads = 0;
  std::optional<ThreadLimit> limit;

  explicit Pool(std::vector<ParallelGroup> specs) {
    CHECK(!specs.empty());
    const bool only = specs.size() == 1;
    const uint32_t all_cpus = std::max(1u, std::thread::hardware_concurrency());
    for (ParallelGroup& spec : specs) {
      if (spec.threads == 0) spec.threads = static_cast<uint32_t>(spec.cpus.size());
      if (spec.threads == 0) spec.threads = all_cpus;
      // oneTBB gives every arena places for a worker and a caller.
      if (!only) spec.threads = std::max(2u, spec.threads);
      threads += spec.threads;
    }
    // oneTBB's own limit is one thread per CPU, callers included; of several groups each has all
    // its threads beside the caller. An arena asks for its threads when it is made.
    if (!only || threads > all_cpus) limit.emplace(threads + 1);
    uint32_t slot = 0;
    for (ParallelGroup& spec : specs) {
      const uint32_t first_slot = slot;
      slot += spec.threads;
      groups.push_back(std::make_unique<Group>(std::move(spec), first_slot, only));
    }
  }
};

std::mutex pools_mutex;
std::atomic<Pool*> current{nullptr};

Pool& replace_pool(std::vector<ParallelGroup> specs) {
  // Replaced pools stay: their threads leave them, and their CPUs, when they next look for work.
  static std::vector<std::unique_ptr<Pool>> pools;
  if (!pools.empty()) pools.back()->limit.reset();
  pools.push_back(std::make_unique<Pool>(std::move(specs)));
  current.store(pools.back().get(), std::memory_order_release);
  return *pools.back();
}

Pool& pool() {
  if (Pool* const chosen = current.load(std::memory_order_acquire)) return *chosen;
  const std::lock_guard lock(pools_mutex);
  Pool* const chosen = current.load(std::memory_order_acquire);
  return chosen ? *chosen : replace_pool({ParallelGroup{}});
}

/// Waits for the other groups' ranges and keeps the first exception of all.
class Completion {
 public:
  explicit Completion(size_t running) : running_(running) {}
  void run(const std::function<void()>& work) {
    std::exception_ptr error;
    try {
      work();
    } catch (...) {
      error = std::current_exception();
    }
    const std::lock_guard lock(mutex_);
    if (!error_) error_ = std::move(error);
    if (--running_ == 0) finished_.notify_one();  // locked: the waiter may destroy this
  }
  void wait() {
    std::unique_lock lock(mutex_);
    finished_.wait(lock, [this] { return running_ == 0; });
    if (error_) std::rethrow_exception(error_);
  }

 private:
  std::mutex mutex_;
  std::condition_variable finished_;
  std::exception_ptr error_;
  size_t running_;
};

/// Runs the range in the group, each task knowing where it is.
void run_in(Pool& all, uint32_t group, Range range, const Task& task) {
  if (range.begin == range.end) return;
  all.groups[group]->workers.run(range, [&](uint64_t i) {
    const ParallelGroupScope scope(group);
    task(i);
  });
}

void run_everywhere(Pool& all, uint64_t count, const Task& task) {
  const auto range_of = [&](const Group& group) -> Range {
    const auto cut = [&](uint64_t slot) { return count * slot / all.threads; };
    return {cut(group.first_slot), cut(group.first_slot + group.spec.threads)};
  };
  const auto groups = static_cast<uint32_t>(all.groups.size());
  Completion completion(groups);
  for (uint32_t g = 1; g < groups; ++g) {
    all.groups[g]->workers.start(
        [&, g] { completion.run([&] { run_in(all, g, range_of(*all.groups[g]), task); }); });
  }
  completion.run([&] { run_in(all, 0, range_of(*all.groups[0]), task); });
  completion.wait();
}

}  // namespace

void set_parallel_groups(std::vector<ParallelGroup> groups) {
  const std::lock_guard lock(pools_mutex);
  replace_pool(std::move(groups));
}

void set_parallel_threads(uint32_t threads) {
  CHECK(threads > 0);
  set_parallel_groups({{.cpus = {}, .threads = threads}});
}

bool parallel_groups_chosen() { return current.load(std::memory_order_acquire) != nullptr; }
uint32_t parallel_group_count() { return static_cast<uint32_t>(pool().groups.size()); }

const ParallelGroup& parallel_group(uint32_t group) {
  CHECK(group < pool().groups.size());
  return pool().groups[group]->spec;
}

uint32_t parallel_threads() { return pool().threads; }

uint32_t parallel_slot() {
  const Group& group = *pool().groups[own_group == kAllGroups ? 0 : own_group];
  return group.first_slot + current_index();
}

void parallel_for(uint64_t count, const std::function<void(uint64_t)>& task) {
  if (count == 0) return;
  Pool& all = pool();
  const bool one_group = all.groups.size() == 1;
  // A group's memory is worked on from its CPUs even by a single task.
  const bool here = one_group || own_group == kAllGroups;
  if (here && (count == 1 || all.threads == 1)) {
    for (uint64_t i = 0; i < count; ++i) task(i);
  } else if (one_group) {
    all.groups[0]->workers.run({0, count}, task);
  } else if (own_group != kAllGroups) {
    run_in(all, own_group, {0, count}, task);
  } else {
    run_everywhere(all, count, task);
  }
}

void parallel_blocks(uint64_t size, uint64_t block,
                     const std::function<void(uint64_t, uint64_t)>& task) {
  parallel_for((size + block - 1) / block,
               [&](uint64_t i) { task(i * block, std::min(size, (i + 1) * block)); });
}

ParallelGroupScope::ParallelGroupScope(uint32_t group) : outer_(own_group) {
  if (group == kAllGroups) return;
  CHECK(group < pool().groups.size());
  CHECK(own_group == kAllGroups || own_group == group);
  own_group = group;
}

ParallelGroupScope::~ParallelGroupScope() { own_group = outer_; }

}  // namespace overspill
