// What tests of several groups of threads share: two of this process's CPUs, and the default back
// at the end.
#pragma once

#include <sched.h>

#include <vector>

#include "engine/base/parallel.h"

namespace overspill::test {

/// Groups for the time of a test; no task may run when it begins or ends.
class GroupsOfTest {
 public:
  explicit GroupsOfTest(std::vector<ParallelGroup> groups) {
    set_parallel_groups(std::move(groups));
  }
  ~GroupsOfTest() { set_parallel_groups({{}}); }
  GroupsOfTest(const GroupsOfTest&) = delete;
  GroupsOfTest& operator=(const GroupsOfTest&) = delete;
};

/// The CPUs that the calling thread may run on.
inline std::vector<uint32_t> cpus_of_thread() {
  std::vector<uint32_t> cpus;
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) != 0) return cpus;
  for (uint32_t cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &set)) cpus.push_back(cpu);
  }
  return cpus;
}

}  // namespace overspill::test
