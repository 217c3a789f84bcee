// Groups of threads: where tasks run, what they are told, and that every task runs once.
#include "engine/base/parallel.h"

#include <gtest/gtest.h>

#include <atomic>
#include <mutex>
#include <set>
#include <thread>

#include "engine/base/error.h"
#include "engine/base/thread.h"
#include "tests/unit/engine/base/parallel_groups.h"

namespace overspill {
namespace {

using test::cpus_of_thread;
using test::GroupsOfTest;

/// How often each of `count` tasks ran, by a call that takes the task.
template <class Call>
std::vector<int> runs(uint64_t count, const Call& call) {
  std::vector<std::atomic<int>> ran(count);
  call([&](uint64_t i) { ++ran[i]; });
  return {ran.begin(), ran.end()};
}

void parallel_for_in(uint32_t group, uint64_t count, const std::function<void(uint64_t)>& task) {
  const ParallelGroupScope scope(group);
  parallel_for(count, task);
}

const std::vector<std::vector<ParallelGroup>>& groupings() {
  static const std::vector<std::vector<ParallelGroup>> all = {
      {{}},
      {{.cpus = {}, .threads = 1}},
      {{.cpus = {}, .threads = 3}},
      {{.cpus = {}, .threads = 1}, {.cpus = {}, .threads = 1}},
      {{.cpus = {}, .threads = 3}, {.cpus = {}, .threads = 1}, {.cpus = {}, .threads = 2}}};
  return all;
}

TEST(Parallel, RunsEveryTaskOnceInAnyGroups) {
  for (const std::vector<ParallelGroup>& groups : groupings()) {
    const GroupsOfTest chosen(groups);
    for (const uint64_t count : {0u, 1u, 2u, 7u, 1000u}) {
      const std::vector<int> once(count, 1);
      EXPECT_EQ(runs(count, [&](const auto& task) { parallel_for(count, task); }), once);
      for (uint32_t g = 0; g < groups.size(); ++g) {
        EXPECT_EQ(runs(count, [&](const auto& task) { parallel_for_in(g, count, task); }), once);
      }
    }
  }
}

TEST(Parallel, BlocksCoverTheRangeAndTheLastIsShorter) {
  for (const std::vector<ParallelGroup>& groups : groupings()) {
    const GroupsOfTest chosen(groups);
    std::mutex mutex;
    std::set<std::pair<uint64_t, uint64_t>> blocks;
    const auto note = [&](uint64_t begin, uint64_t end) {
      const std::lock_guard lock(mutex);
      blocks.insert({begin, end});
    };
    const std::set<std::pair<uint64_t, uint64_t>> expected = {{0, 4}, {4, 8}, {8, 10}};
    parallel_blocks(10, 4, note);
    EXPECT_EQ(blocks, expected);
  }
}

TEST(Parallel, ThreadsAddUpAndSlotsOfRunningTasksDiffer) {
  for (const std::vector<ParallelGroup>& groups : groupings()) {
    const GroupsOfTest chosen(groups);
    uint32_t threads = 0;
    for (uint32_t g = 0; g < parallel_group_count(); ++g) threads += parallel_group(g).threads;
    EXPECT_EQ(parallel_threads(), threads);
    std::vector<std::atomic<bool>> busy(parallel_threads());
    std::atomic<int> clashes{0};
    const auto task = [&](uint64_t) {
      const uint32_t slot = parallel_slot();
      if (slot >= busy.size() || busy[slot].exchange(true)) ++clashes;
      std::this_thread::yield();
      if (slot < busy.size()) busy[slot] = false;
    };
    for (int round = 0; round < 20; ++round) parallel_for(200, task);
    EXPECT_EQ(clashes, 0);
  }
}

TEST(Parallel, NestedCallsFinishInTheirGroup) {
  const GroupsOfTest chosen({{.cpus = {}, .threads = 2}, {.cpus = {}, .threads = 2}});
  std::vector<std::atomic<int>> ran(16 * 16);
  std::atomic<int> strays{0};
  const auto group_of_slot = [] { return parallel_slot() / 2; };
  parallel_for(16, [&](uint64_t i) {
    const uint32_t outer = group_of_slot();
    parallel_for(16, [&](uint64_t j) {
      ++ran[i * 16 + j];
      if (group_of_slot() != outer) ++strays;
    });
  });
  for (const auto& count : ran) EXPECT_EQ(count, 1);
  EXPECT_EQ(strays, 0);
}

TEST(Parallel, ThreadsWithScopesCallAtTheSameTime) {
  const GroupsOfTest chosen({{.cpus = {}, .threads = 2}, {.cpus = {}, .threads = 2}});
  std::atomic<int> strays{0};
  std::atomic<uint64_t> sum{0};
  const auto lane = [&](uint32_t group) {
    const ParallelGroupScope scope(group);
    for (int round = 0; round < 50; ++round) {
      parallel_for(100, [&](uint64_t i) {
        sum += i;
        if (group != kAllGroups && parallel_slot() / 2 != group) ++strays;
      });
    }
  };
  std::thread first(lane, 0), second(lane, 1), third(lane, kAllGroups);
  first.join();
  second.join();
  third.join();
  EXPECT_EQ(sum, 3u * 50 * 4950);
  EXPECT_EQ(strays, 0);
}

#if !defined(__SANITIZE_THREAD__)  // plain threads there: an exception ends the process
TEST(Parallel, ATasksErrorReachesTheCaller) {
  for (const std::vector<ParallelGroup>& groups : groupings()) {
    const GroupsOfTest chosen(groups);
    for (const uint64_t bad : {0u, 50u, 99u}) {
      const auto task = [&](uint64_t i) {
        if (i == bad) fail(ErrorCode::internal, "task refused");
      };
      EXPECT_THROW(parallel_for(100, task), Error);
    }
    EXPECT_EQ(runs(9, [](const auto& task) { parallel_for(9, task); }), std::vector<int>(9, 1));
  }
}
#endif

TEST(ParallelDeathTest, AskingForAnotherGroupWithinOneIsABug) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_DEATH(
      {
        set_parallel_groups({{.cpus = {}, .threads = 1}, {.cpus = {}, .threads = 1}});
        const ParallelGroupScope outer(0);
        const ParallelGroupScope inner(1);
      },
      "own_group");
}

// ---- pinned ----

class PinnedGroups : public testing::Test {
 protected:
  void SetUp() override {
    cpus_ = cpus_of_thread();
    if (cpus_.size() < 2) GTEST_SKIP() << "this process may use only one CPU";
    cpus_.resize(2);
  }
  /// Counts a task that runs elsewhere, or may.
  void check_place(uint32_t group) {
    const auto cpu = static_cast<uint32_t>(sched_getcpu());
    if (cpu != cpus_[group] || cpus_of_thread() != std::vector{cpus_[group]}) ++strays_;
    if (parallel_slot() / 2 != group) ++strays_;
  }

  std::vector<uint32_t> cpus_;
  std::atomic<int> strays_{0};
};

TEST_F(PinnedGroups, TasksRunOnTheirGroupsCpus) {
  const std::vector<uint32_t> before = cpus_of_thread();
  const GroupsOfTest chosen({{.cpus = {cpus_[0]}}, {.cpus = {cpus_[1]}}});
  ASSERT_EQ(parallel_threads(), 4u) << "a caller and a worker each";
  for (int round = 0; round < 20; ++round) {
    parallel_for(64, [&](uint64_t i) { check_place(i < 32 ? 0 : 1); });
    for (const uint32_t group : {1u, 0u}) {
      parallel_for_in(group, 64, [&](uint64_t) { check_place(group); });
      parallel_for_in(group, 1, [&](uint64_t) { check_place(group); });
    }
    EXPECT_EQ(cpus_of_thread(), before) << "the caller's own CPUs";
  }
  EXPECT_EQ(strays_, 0);
}

TEST_F(PinnedGroups, TwoCallersAreGivenBackTheirCpus) {
  const GroupsOfTest chosen({{.cpus = {cpus_[0]}}, {.cpus = {cpus_[1]}}});
  const auto lane = [&](uint32_t group) {
    const CpuBinding binding(std::vector{cpus_[1 - group]});
    const ParallelGroupScope scope(group);
    for (int round = 0; round < 50; ++round) {
      parallel_for(16, [&](uint64_t) { check_place(group); });
    }
    EXPECT_EQ(cpus_of_thread(), std::vector{cpus_[1 - group]});
  };
  std::thread first(lane, 0), second(lane, 1);
  first.join();
  second.join();
  EXPECT_EQ(strays_, 0);
}

TEST_F(PinnedGroups, AnOnlyGroupIsPinnedToo) {
  const std::vector<uint32_t> before = cpus_of_thread();
  const GroupsOfTest chosen({{.cpus = {cpus_[1]}, .threads = 2}});
  parallel_for(64, [&](uint64_t) {
    if (cpus_of_thread() != std::vector{cpus_[1]}) ++strays_;
  });
  EXPECT_EQ(strays_, 0);
  EXPECT_EQ(cpus_of_thread(), before);
}

TEST_F(PinnedGroups, ReplacedGroupsLeaveNoThreadPinned) {
  const std::vector<uint32_t> before = cpus_of_thread();
  {
    const GroupsOfTest chosen({{.cpus = {cpus_[0]}}, {.cpus = {cpus_[1]}}});
    parallel_for(64, [&](uint64_t i) { check_place(i < 32 ? 0 : 1); });
  }
  std::atomic<int> pinned{0};
  parallel_for(1000, [&](uint64_t) {
    if (cpus_of_thread() != before) ++pinned;
  });
  EXPECT_EQ(pinned, 0);
  EXPECT_EQ(strays_, 0);
}

TEST(CpuBinding, ChangesNothingWithoutCpusOrWhenRefused) {
  const std::vector<uint32_t> before = cpus_of_thread();
  {
    const CpuBinding none({});
    EXPECT_EQ(cpus_of_thread(), before);
    const CpuBinding absent(std::vector<uint32_t>{CPU_SETSIZE - 1, CPU_SETSIZE + 5});
    EXPECT_EQ(cpus_of_thread(), before);
  }
  EXPECT_EQ(cpus_of_thread(), before);
}

}  // namespace
}  // namespace overspill
