// Shares of machines described by hand, and of those that hwloc describes.
#include "offload/cpu_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <set>

#include "engine/base/error.h"
#include "offload/drive_locality.h"
#include "tests/unit/offload/topology_files.h"

namespace overspill {
namespace {

struct Shape {
  uint32_t nodes, domains_per_node, cores_per_domain;
  bool smt = true;
};

/// Numbered as Linux numbers an EPYC: cores from 0, then their siblings in the same order.
Machine machine_of(const Shape& shape) {
  Machine machine;
  machine.cores = shape.nodes * shape.domains_per_node * shape.cores_per_domain;
  for (uint32_t i = 0; i < machine.cores; ++i) {
    const uint32_t domain = i / shape.cores_per_domain;
    Core core{.numa_node = domain / shape.domains_per_node, .l3_domain = domain, .cpus = {i}};
    if (shape.smt) core.cpus.push_back(machine.cores + i);
    machine.core_list.push_back(core);
  }
  return machine;
}

const Shape kTwoSocketsNps1{.nodes = 2, .domains_per_node = 12, .cores_per_domain = 8};
const Shape kTwoSocketsNps4{.nodes = 8, .domains_per_node = 3, .cores_per_domain = 8};

CpuPlan plan(const Machine& machine, uint32_t rank = 0, uint32_t ranks = 1,
             std::vector<uint32_t> allowed = {}) {
  return plan_cpus(machine,
                   {.allowed = std::move(allowed), .local_rank = rank, .local_ranks = ranks});
}

std::vector<uint32_t> cpus(uint32_t first, uint32_t last) {
  std::vector<uint32_t> list(last - first + 1);
  std::iota(list.begin(), list.end(), first);
  return list;
}

/// "node: compute / io" of each node, then whether it is pinned.
std::string text(const CpuPlan& plan) {
  std::string all;
  for (const NodeCpus& node : plan.nodes) {
    all += fmt::format("{}: {} / {}; ", node.numa_node, cpu_list(node.compute), cpu_list(node.io));
  }
  return all + (plan.pinned ? "pinned" : "free");
}

TEST(CpuPlan, AllCcdsOfBothSocketsComputeAndTheFirstCoreOfEachServesDrives) {
  const CpuPlan both = plan(machine_of(kTwoSocketsNps1));
  EXPECT_EQ(text(both), "0: 1-95 / 0,192; 1: 97-191 / 96,288; pinned");
  EXPECT_EQ(cpu_list(both.nodes[0].idle), "193-287");
  EXPECT_EQ(cpu_list(both.compute_cpus()), "1-95,97-191");
  EXPECT_EQ(cpu_list(both.io_cpus()), "0,96,192,288");
  EXPECT_EQ(cpu_list(both.all_cpus()), "0-383");
  const std::vector<ParallelGroup> groups = parallel_groups_of(both);
  ASSERT_EQ(groups.size(), 2u);
  EXPECT_EQ(groups[1].cpus, cpus(97, 191));
  EXPECT_EQ(groups[1].threads, 95u);
}

TEST(CpuPlan, WithoutSmtNothingIsIdle) {
  Shape shape = kTwoSocketsNps1;
  shape.smt = false;
  const CpuPlan both = plan(machine_of(shape));
  EXPECT_EQ(text(both), "0: 1-95 / 0; 1: 97-191 / 96; pinned");
  EXPECT_TRUE(both.nodes[0].idle.empty());
}

TEST(CpuPlan, UpToOneRankANodeGetsWholeNodesThatFollowEachOther) {
  const Machine machine = machine_of(kTwoSocketsNps4);
  EXPECT_EQ(plan(machine).nodes.size(), 8u);
  EXPECT_EQ(text(plan(machine, 1, 2)),
            "4: 97-119 / 96,288; 5: 121-143 / 120,312; 6: 145-167 / 144,336; "
            "7: 169-191 / 168,360; pinned");
  EXPECT_EQ(text(plan(machine, 5, 8)), "5: 121-143 / 120,312; pinned");
  size_t nodes = 0;
  for (uint32_t rank = 0; rank < 3; ++rank) nodes += plan(machine, rank, 3).nodes.size();
  EXPECT_EQ(nodes, 8u);
}

TEST(CpuPlan, MoreRanksThanNodesDivideCcds) {
  const Machine machine = machine_of(kTwoSocketsNps1);
  EXPECT_EQ(text(plan(machine, 0, 8)), "0: 1-23 / 0,192; pinned");
  EXPECT_EQ(text(plan(machine, 5, 8)), "1: 121-143 / 120,312; pinned");
  // Five ranks: three on the first node and two on the second.
  EXPECT_EQ(text(plan(machine, 2, 5)), "0: 65-95 / 64,256; pinned");
  EXPECT_EQ(text(plan(machine, 4, 5)), "1: 145-191 / 144,336; pinned");
}

TEST(CpuPlan, CcdsThatDoNotDivideEvenlyAreCut) {
  const Machine machine = machine_of({.nodes = 1, .domains_per_node = 3, .cores_per_domain = 4});
  EXPECT_EQ(text(plan(machine, 0, 2)), "0: 0-5 / ; pinned");
  EXPECT_EQ(text(plan(machine, 1, 2)), "0: 6-11 / ; pinned");
  EXPECT_EQ(cpu_list(plan(machine, 1, 2).io_cpus()), "6-11,18-23") << "I/O floats over the share";
}

TEST(CpuPlan, UnequalCcdsAreNotCutWhereTheirNumberIsEven) {
  const Machine machine = machine_of({.nodes = 1, .domains_per_node = 2, .cores_per_domain = 8});
  std::vector<uint32_t> allowed = cpus(0, 14);  // one core of the second is not ours
  EXPECT_EQ(text(plan(machine, 0, 2, allowed)), "0: 1-7 / 0; pinned");
  EXPECT_EQ(text(plan(machine, 1, 2, allowed)), "0: 8-14 / ; pinned");
}

TEST(CpuPlan, ASmallMachineIsLeftToTheScheduler) {
  const Machine machine = machine_of({.nodes = 1, .domains_per_node = 1, .cores_per_domain = 2});
  EXPECT_EQ(text(plan(machine)), "0: 0-1 / ; free");
  const std::vector<ParallelGroup> groups = parallel_groups_of(plan(machine));
  ASSERT_EQ(groups.size(), 1u);
  EXPECT_TRUE(groups[0].cpus.empty());
  EXPECT_EQ(groups[0].threads, 2u);
  EXPECT_EQ(text(plan(machine, 1, 2)), "0: 1 / ; pinned");
}

TEST(CpuPlan, EightCoresAreEnoughToReserveOne) {
  EXPECT_EQ(text(plan(machine_of({1, 1, 8, false}))), "0: 1-7 / 0; pinned");
  EXPECT_EQ(text(plan(machine_of({1, 1, 7, false}))), "0: 0-6 / ; free");
}

TEST(CpuPlan, KeepsToTheAllowedCpus) {
  const Machine machine = machine_of(kTwoSocketsNps1);
  EXPECT_EQ(text(plan(machine, 0, 1, {7, 100, 101})), "0: 7 / ; 1: 100-101 / ; pinned");
  EXPECT_EQ(text(plan(machine, 0, 1, {3, 195, 196})), "0: 3,196 / ; free")
      << "of core 4 only the sibling is allowed";
  EXPECT_EQ(cpu_list(plan(machine, 0, 1, {3, 195, 196}).all_cpus()), "3,195-196");
  // Where there is one core on the first node, it gets one rank and the second all others.
  std::vector<uint32_t> uneven = cpus(96, 110);
  uneven.push_back(0);
  EXPECT_EQ(text(plan(machine, 0, 4, uneven)), "0: 0 / ; pinned");
  EXPECT_EQ(text(plan(machine, 3, 4, uneven)), "1: 106-110 / ; pinned");
}

TEST(CpuPlan, SharesAreDisjointCoverEverythingAndAreFair) {
  for (const Shape& shape : {kTwoSocketsNps1, kTwoSocketsNps4, Shape{1, 1, 5}, Shape{3, 2, 3}}) {
    const Machine machine = machine_of(shape);
    for (uint32_t ranks = 1; ranks <= std::min(machine.cores, 40u); ++ranks) {
      std::vector<uint32_t> seen;
      size_t least = SIZE_MAX, most = 0;
      for (uint32_t rank = 0; rank < ranks; ++rank) {
        const CpuPlan share = plan(machine, rank, ranks);
        const std::vector<uint32_t> own = share.all_cpus();
        seen.insert(seen.end(), own.begin(), own.end());
        least = std::min(least, own.size());
        most = std::max(most, own.size());
        for (const NodeCpus& node : share.nodes) EXPECT_FALSE(node.compute.empty());
      }
      std::ranges::sort(seen);
      EXPECT_EQ(seen, cpus(0, 2 * machine.cores - 1)) << ranks << " ranks";
      EXPECT_LE(most, 2 * least) << ranks << " ranks";
    }
  }
}

TEST(CpuPlan, RefusesMoreRanksThanCores) {
  const Machine machine = machine_of({1, 1, 4});
  try {
    plan(machine, 0, 5);
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_config);
    EXPECT_STREQ(error.what(),
                 "5 ranks on this machine, but this process may use only 4 of its 4 cores; start "
                 "fewer ranks on it, or allow them more CPUs (taskset, cgroup cpuset)");
  }
  EXPECT_THROW(plan(machine, 1, 2, {2, 6}), Error) << "both are of one core";
}

// ---- ranks with homes ----

/// Two sockets of four nodes each, 16 apart within a socket and 32 between them.
Machine with_distances(Machine machine, uint32_t nodes) {
  for (uint32_t from = 0; from < nodes; ++from) {
    NumaNode node{.index = from, .memory_bytes = 1, .cpus = ""};
    for (uint32_t to = 0; to < nodes; ++to) {
      node.distances.push_back(from == to ? 10 : from / 4 == to / 4 ? 16 : 32);
    }
    machine.numa_nodes.push_back(node);
  }
  return machine;
}

std::vector<std::string> texts(const Machine& machine, const std::vector<uint32_t>& homes) {
  std::vector<std::string> all;
  for (const CpuPlan& share : plan_cpus_at_homes(machine, {}, homes)) all.push_back(text(share));
  return all;
}

TEST(CpuPlanAtHomes, RanksDivideTheirHomeAndNodesWithoutRanksGoToTheNearest) {
  const Machine machine = with_distances(machine_of(kTwoSocketsNps4), 8);
  EXPECT_EQ(texts(machine, {1, 3, 6}),
            (std::vector<std::string>{"1: 25-47 / 24,216; 0: 1-23 / 0,192; pinned",
                                      "3: 73-95 / 72,264; 2: 49-71 / 48,240; pinned",
                                      "6: 145-167 / 144,336; 4: 97-119 / 96,288; "
                                      "5: 121-143 / 120,312; 7: 169-191 / 168,360; pinned"}));
}

TEST(CpuPlanAtHomes, EquallyNearRanksDivideANodeThatIsNobodysHome) {
  const Machine machine = machine_of(kTwoSocketsNps1);
  EXPECT_EQ(texts(machine, {0, 0}),
            (std::vector<std::string>{"0: 1-47 / 0,192; 1: 97-143 / 96,288; pinned",
                                      "0: 49-95 / 48,240; 1: 145-191 / 144,336; pinned"}));
}

TEST(CpuPlanAtHomes, UnevenSharesOfTheHomeAreEvenedOutByThoseOfOtherNodes) {
  const Machine machine = machine_of({.nodes = 2, .domains_per_node = 1, .cores_per_domain = 3});
  for (const CpuPlan& share : plan_cpus_at_homes(machine, {}, std::vector<uint32_t>{0, 0})) {
    EXPECT_EQ(share.compute_cpus().size(), 3u);
  }
}

TEST(CpuPlanAtHomes, AHomeOnEachNodeIsWhatPlanCpusGives) {
  const Machine machine = machine_of(kTwoSocketsNps1);
  const std::vector<std::string> shares = texts(machine, {0, 0, 0, 1, 1});
  for (uint32_t rank = 0; rank < 5; ++rank) EXPECT_EQ(shares[rank], text(plan(machine, rank, 5)));
}

TEST(CpuPlanAtHomes, RefusesMoreRanksThanTheHomeHasCores) {
  const Machine machine = machine_of({.nodes = 2, .domains_per_node = 1, .cores_per_domain = 2});
  const std::vector<uint32_t> homes = {1, 1, 1};
  EXPECT_THROW(plan_cpus_at_homes(machine, {}, homes), Error);
  EXPECT_THROW(plan_cpus_at_homes(machine, {0, 1}, std::vector<uint32_t>{1}), Error);
}

TEST(CpuPlan, ListsCpusInRanges) {
  EXPECT_EQ(cpu_list({}), "");
  EXPECT_EQ(cpu_list({5}), "5");
  EXPECT_EQ(cpu_list({9, 0, 1, 3, 2, 7}), "0-3,7,9");
}

TEST(CpuPlan, PlansThisMachine) {
  const CpuPlan here = plan(read_machine(), 0, 1, allowed_cpus());
  EXPECT_EQ(here.all_cpus(), allowed_cpus());
}

/// hwloc's descriptions of machines that this one is not.
class DescribedMachine : public testing::Test {
 protected:
  void TearDown() override { ::unsetenv("HWLOC_SYNTHETIC"); }
};

TEST_F(DescribedMachine, CoresOfASyntheticTwoSocketMachine) {
  ::setenv("HWLOC_SYNTHETIC", "pack:2 [numa] l3:4 core:8 pu:2", 1);
  const Machine machine = read_machine();
  ASSERT_EQ(machine.core_list.size(), 64u);
  EXPECT_FALSE(machine.is_this_system);
  EXPECT_EQ(machine.core_list[63].cpus, cpus(126, 127));
  EXPECT_EQ(machine.core_list[31].l3_domain, 3u);
  EXPECT_EQ(machine.core_list[32].numa_node, 1u);
  const CpuPlan share = plan(machine, 3, 4);
  EXPECT_EQ(share.nodes.size(), 1u);
  EXPECT_EQ(cpu_list(share.all_cpus()), "96-127");
  EXPECT_EQ(cpu_list(share.io_cpus()), "96-97");
}

TEST_F(DescribedMachine, ThreadsOfMachinesWithoutCoresOrCachesCountAsCores) {
  ::setenv("HWLOC_SYNTHETIC", "pu:3", 1);
  EXPECT_EQ(text(plan(read_machine())), "0: 0-2 / ; free");
}

TEST_F(DescribedMachine, EightNodesOfAnEpyc) {
  const std::filesystem::path path = test::topology_file("epyc-7401x2-nps4-4gpu-nvme.xml");
  if (!std::filesystem::exists(path)) GTEST_SKIP() << path << " is absent";
  const Machine machine = read_machine(path);
  EXPECT_EQ(machine.core_list.size(), 48u);
  EXPECT_EQ(text(plan(machine, 3, 8)), "3: 18-23 / ; pinned");
  EXPECT_EQ(cpu_list(plan(machine, 3, 8).io_cpus()), "18-23,66-71");
  EXPECT_EQ(text(plan(machine, 1, 4)), "2: 12-17 / ; 3: 18-23 / ; pinned");
  EXPECT_EQ(text(plan(machine, 1, 16)), "0: 3-5 / ; pinned") << "its second L3 domain";
}

}  // namespace
}  // namespace overspill
