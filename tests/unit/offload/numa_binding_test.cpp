// Binding to a node that exists, and refusals without harm.
#include "offload/numa_binding.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

#include "engine/base/thread.h"
#include "offload/arena.h"
#include "offload/topology.h"

namespace overspill {
namespace {

int allowed_cpus() {
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  EXPECT_EQ(sched_getaffinity(0, sizeof(cpus), &cpus), 0);
  return CPU_COUNT(&cpus);
}

TEST(NumaBinding, RestoresTheThreadsProcessors) {
  const int before = allowed_cpus();
  const Machine machine = read_machine();
  for (const NumaNode& node : machine.numa_nodes) {
    const CpuBinding binding(cpus_of_node(machine, node.index));
    if (!binding.bound()) GTEST_SKIP() << "this system does not bind threads";
    EXPECT_EQ(allowed_cpus(), static_cast<int>(cpus_of_node(machine, node.index).size()));
  }
  EXPECT_EQ(allowed_cpus(), before);
}

TEST(NumaBinding, RefusesANodeThatDoesNotExist) {
  const int before = allowed_cpus();
  const CpuBinding binding(cpus_of_node(read_machine(), 9999));
  EXPECT_FALSE(binding.bound());
  EXPECT_EQ(allowed_cpus(), before);
  const Arena arena(1 << 20, "test");
  EXPECT_FALSE(place_on_node(arena.memory(), arena.bytes(), 9999));
}

/// The node of each page; negative where the kernel does not say.
std::vector<int> nodes_of_pages(const Arena& arena) {
  std::vector<void*> pages;
  for (uint64_t at = 0; at < arena.bytes(); at += 4096) pages.push_back(arena.memory() + at);
  std::vector<int> nodes(pages.size(), -1);
  ::syscall(SYS_move_pages, 0, pages.size(), pages.data(), nullptr, nodes.data(), 0);
  return nodes;
}

TEST(NumaBinding, MovesMemoryWithItsContent) {
  const Arena arena(4 << 20, "test");
  arena.memory()[12345] = std::byte{7};
  for (const NumaNode& node : read_machine().numa_nodes) {
    if (!place_on_node(arena.memory(), arena.bytes(), node.index)) {
      GTEST_SKIP() << "this system does not bind memory";
    }
    EXPECT_EQ(arena.memory()[12345], std::byte{7});
    const std::vector<int> nodes = nodes_of_pages(arena);
    if (nodes.front() < 0) GTEST_SKIP() << "this system does not tell where pages are";
    EXPECT_EQ(std::ranges::count(nodes, static_cast<int>(node.index)), std::ssize(nodes));
  }
}

}  // namespace
}  // namespace overspill
