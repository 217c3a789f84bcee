// Placements on real hosts' descriptions, on a two-socket EPYC 9005, and on small ones by hand.
#include "offload/rank_placement.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <set>

#include "engine/base/error.h"
#include "engine/base/fd.h"
#include "tests/unit/offload/topology_files.h"

namespace overspill {
namespace {

RankPlacement plan(const Machine& machine, uint32_t ranks, std::vector<std::string> drives = {}) {
  return plan_ranks(machine,
                    {.ranks = ranks, .allowed = {}, .drives = std::move(drives), .gpus = {}});
}

Machine epyc_9005(unsigned gpus_on_first = 2) {
  const test::TemporaryPath file("epyc.xml");
  write_text_file(file.path(), test::Epyc9005Xml(gpus_on_first).text());
  return read_machine(file.path());
}

std::vector<uint32_t> cpus_of(const PlacedRank& rank) {
  std::vector<uint32_t> cpus;
  for (const PlacedCores& part : rank.cores) {
    for (const auto& list : {part.cpus.compute, part.cpus.io, part.cpus.idle}) {
      cpus.insert(cpus.end(), list.begin(), list.end());
    }
  }
  return cpus;
}

std::vector<std::string> names(const std::vector<PlacedDevice>& devices) {
  std::vector<std::string> all;
  for (const PlacedDevice& device : devices) all.push_back(device.name);
  return all;
}

bool warns_of(const RankPlacement& placement, const std::string& part) {
  return std::ranges::any_of(placement.warnings, [&](const std::string& warning) {
    return warning.find(part) != std::string::npos;
  });
}

const Gpu& gpu_of(const Machine& machine, const PlacedRank& rank) {
  const auto gpu = std::ranges::find(machine.gpus, rank.gpu.value().name, &Gpu::pci);
  EXPECT_NE(gpu, machine.gpus.end());
  return *gpu;
}

bool is_on(const PlacedRank& rank, int node) {
  return std::ranges::any_of(rank.cores, [&](const PlacedCores& part) {
    return static_cast<int>(part.cpus.numa_node) == node;
  });
}

/// What holds for every placement on a machine whose GPUs' nodes are known and have cores enough.
void expect_sound(const Machine& machine, const RankPlacement& placement) {
  std::vector<uint32_t> seen;
  size_t least = SIZE_MAX, most = 0;
  std::set<std::string> gpus;
  uint64_t memory = 0;
  for (const PlacedRank& rank : placement.ranks) {
    const std::vector<uint32_t> cpus = cpus_of(rank);
    seen.insert(seen.end(), cpus.begin(), cpus.end());
    least = std::min(least, cpus.size());
    most = std::max(most, cpus.size());
    for (const PlacedCores& part : rank.cores) {
      EXPECT_FALSE(part.cpus.compute.empty());
      EXPECT_FALSE(part.reason.empty());
    }
    for (const PlacedMemory& part : rank.memory) memory += part.bytes;
    EXPECT_EQ(rank.gpu.has_value(), !machine.gpus.empty());
    if (rank.gpu) {
      gpus.insert(rank.gpu->name);
      const int node = gpu_of(machine, rank).numa_node;
      EXPECT_EQ(static_cast<int>(rank.cores.front().cpus.numa_node), node) << rank.gpu->reason;
    }
    bool any_local = false, all_local = true;
    for (const PlacedDevice& placed : rank.drives) {
      const auto drive = std::ranges::find(machine.drives, placed.name, &Drive::name);
      (is_on(rank, drive->numa_node) ? any_local : all_local) = is_on(rank, drive->numa_node);
    }
    EXPECT_TRUE(!any_local || all_local) << "local and remote drives";
  }
  std::ranges::sort(seen);
  EXPECT_EQ(std::ranges::adjacent_find(seen), seen.end()) << "a CPU has two ranks";
  EXPECT_EQ(seen.size(), machine.hardware_threads) << "CPUs without a rank";
  EXPECT_LE(most, 2 * least);
  EXPECT_EQ(gpus.size(), std::min(machine.gpus.size(), placement.ranks.size()));
  EXPECT_LE(memory, machine.memory_bytes);
}

class PlacementOnRealHost : public testing::TestWithParam<const char*> {};

TEST_P(PlacementOnRealHost, IsDisjointFairAndNear) {
  const std::filesystem::path path = test::topology_file(GetParam());
  if (!std::filesystem::exists(path)) GTEST_SKIP() << path << " is absent";
  const Machine machine = read_machine(path);
  for (const uint32_t ranks : {1u, 2u, 4u, 8u}) {
    SCOPED_TRACE(ranks);
    if (ranks > machine.cores) {
      EXPECT_THROW(plan(machine, ranks), Error);
    } else {
      expect_sound(machine, plan(machine, ranks));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(RankPlacement, PlacementOnRealHost,
                         testing::Values("dgx2-16gpu.xml", "epyc-7401x2-nps4-4gpu-nvme.xml",
                                         "epyc-7402x2-8gpu-nvme.xml",
                                         "threadripper-2990wx-mixed-gpu-nvme.xml"));

TEST(RankPlacement, IsDisjointFairAndNearOnAnEpyc9005) {
  const Machine machine = epyc_9005();
  for (const uint32_t ranks : {1u, 2u, 4u, 8u}) {
    SCOPED_TRACE(ranks);
    expect_sound(machine, plan(machine, ranks));
  }
}

TEST(RankPlacement, FourRanksOfAnEpyc9005EachHaveAGpuHalfASocketAndItsDrives) {
  const RankPlacement placement = plan(epyc_9005(), 4);
  EXPECT_TRUE(placement.warnings.empty());
  const PlacedRank& rank = placement.ranks[2];
  ASSERT_EQ(rank.cores.size(), 1u);
  EXPECT_EQ(cpu_list(rank.cores[0].cpus.compute), "65-95");
  EXPECT_EQ(cpu_list(rank.cores[0].cpus.io), "64,192");
  EXPECT_EQ(cpu_list(rank.cores[0].cpus.idle), "193-223");
  EXPECT_EQ(rank.cores[0].reason, "its GPU's node, shared with rank 3");
  ASSERT_EQ(rank.memory.size(), 1u);
  EXPECT_EQ(rank.memory[0].numa_node, 1u);
  EXPECT_EQ(rank.memory[0].bytes, uint64_t{384} << 30);
  EXPECT_EQ(rank.memory[0].reason, "local; 32 of 64 cores near it");
  EXPECT_EQ(rank.gpu->name, "0000:a1:00.0");
  EXPECT_EQ(rank.gpu->reason, "nearest to NUMA node 1");
  EXPECT_EQ(names(rank.drives),
            (std::vector<std::string>{"nvme4n1", "nvme5n1", "nvme6n1", "nvme7n1"}));
  EXPECT_EQ(rank.drives[0].reason, "on the rank's node 1, shared with rank 3");
}

TEST(RankPlacement, FewerRanksThanGpusSpreadOverTheSockets) {
  const RankPlacement placement = plan(epyc_9005(), 2);
  EXPECT_EQ(placement.ranks[0].gpu->name, "0000:01:00.0");
  EXPECT_EQ(placement.ranks[1].gpu->name, "0000:a1:00.0");
}

TEST(RankPlacement, CoresFollowTheGpusThatRanksHaveAlready) {
  const Machine machine = epyc_9005();
  const auto near = [&](std::vector<size_t> indices) {
    PlacementOptions options{.ranks = static_cast<uint32_t>(indices.size())};
    for (const size_t index : indices) options.gpus.push_back(machine.gpus[index].pci);
    const RankPlacement placement = plan_ranks(machine, options);
    expect_sound(machine, placement);
    for (size_t rank = 0; rank < indices.size(); ++rank) {
      EXPECT_EQ(placement.ranks[rank].gpu->name, options.gpus[rank]);
      EXPECT_EQ(static_cast<int>(placement.ranks[rank].cores[0].cpus.numa_node),
                machine.gpus[indices[rank]].numa_node);
    }
  };
  near({0, 1});        // CUDA's first two, on one socket
  near({3, 0, 2, 1});  // in an order of CUDA's own
}

TEST(RankPlacement, GpusThatTheMachineDoesNotListAreChosen) {
  const RankPlacement chosen = plan(epyc_9005(), 2);
  const RankPlacement unknown = plan_ranks(
      epyc_9005(),
      {.ranks = 2, .allowed = {}, .drives = {}, .gpus = {"0000:01:00.0", "0000:fe:00.0"}});
  for (size_t rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(unknown.ranks[rank].gpu->name, chosen.ranks[rank].gpu->name);
  }
}

TEST(RankPlacement, OneRankHasTheWholeMachineAndAllDrives) {
  const PlacedRank rank = plan(epyc_9005(), 1).ranks[0];
  ASSERT_EQ(rank.cores.size(), 2u);
  EXPECT_EQ(rank.cores[1].reason, "no rank is at home on it; node 0 is nearest (distance 32)");
  EXPECT_EQ(rank.drives.size(), 8u);
}

TEST(RankPlacement, RanksOfThreeGpusOnOneSocketShareItsCores) {
  const RankPlacement placement = plan(epyc_9005(3), 4);
  for (size_t rank = 0; rank < 4; ++rank) {
    const PlacedCores& cores = placement.ranks[rank].cores.at(0);
    EXPECT_EQ(cores.cpus.numa_node, rank < 3 ? 0u : 1u);
    EXPECT_EQ(placement.ranks[rank].gpu->reason,
              rank < 3 ? "nearest to NUMA node 0" : "nearest to NUMA node 1");
    const size_t compute = cores.cpus.compute.size();
    EXPECT_GE(compute, rank < 3 ? 20u : 63u);
    EXPECT_LE(compute, rank < 3 ? 21u : 63u);
  }
  EXPECT_TRUE(warns_of(placement, "some ranks compute on 20 cores, others on 63"));
}

TEST(RankPlacement, MoreRanksThanGpusShareThem) {
  const RankPlacement placement = plan(epyc_9005(), 8);
  EXPECT_EQ(placement.ranks[0].gpu->reason, "nearest to NUMA node 0, shared with rank 1");
  EXPECT_TRUE(warns_of(placement, "8 ranks share 4 GPUs"));
}

TEST(RankPlacement, NamedDrivesAloneAreUsed) {
  const Machine machine = epyc_9005();
  const RankPlacement placement = plan(machine, 2, {"nvme5n1", "nvme4n1"});
  EXPECT_EQ(names(placement.ranks[1].drives), (std::vector<std::string>{"nvme5n1", "nvme4n1"}));
  EXPECT_EQ(placement.ranks[0].drives[0].reason,
            "no drive is on node 0: uses all drives; this one is on node 1 (distance 32), shared "
            "with rank 1");
  EXPECT_THROW(plan(machine, 2, {"nvme9n1"}), Error);
}

// ---- small machines by hand ----

/// `nodes` nodes of two cores each, without distances.
Machine small_machine(uint32_t nodes) {
  Machine machine;
  for (uint32_t node = 0; node < nodes; ++node) {
    machine.numa_nodes.push_back({.index = node, .memory_bytes = 1000, .cpus = ""});
    for (const uint32_t cpu : {2 * node, 2 * node + 1}) {
      machine.core_list.push_back({.numa_node = node, .l3_domain = node, .cpus = {cpu}});
    }
  }
  return machine;
}

Drive drive(const char* name, int node) {
  return {.name = name, .model = "", .size_bytes = 1, .numa_node = node, .rotational = false};
}

TEST(RankPlacement, WithoutGpusRanksDivideTheMachine) {
  const RankPlacement placement = plan(small_machine(2), 4);
  for (uint32_t rank = 0; rank < 4; ++rank) {
    EXPECT_FALSE(placement.ranks[rank].gpu.has_value());
    EXPECT_EQ(cpus_of(placement.ranks[rank]), std::vector<uint32_t>{rank});
  }
  EXPECT_EQ(placement.ranks[3].cores[0].reason, "the ranks divide the machine, shared with rank 2");
}

TEST(RankPlacement, DrivesOfNoNodeComeLastAndOthersThanNvmeOnlyWithoutNvme) {
  Machine machine = small_machine(2);
  machine.drives = {drive("nvme0n1", -1), drive("nvme1n1", 1), drive("sda", 0)};
  const std::vector<PlacedDevice> remote = plan(machine, 2).ranks[0].drives;
  EXPECT_EQ(names(remote), (std::vector<std::string>{"nvme1n1", "nvme0n1"}));
  EXPECT_NE(remote[0].reason.find("on node 1 (distance unknown)"), std::string::npos);
  EXPECT_NE(remote[1].reason.find("this one's node is unknown"), std::string::npos);
  machine.drives = {drive("sda", 0)};
  EXPECT_EQ(names(plan(machine, 1).ranks[0].drives), std::vector<std::string>{"sda"});
}

TEST(RankPlacement, AGpuWhoseNodeHasNoCoreLeftIsServedFromTheNearest) {
  Machine machine = small_machine(3);
  machine.numa_nodes[0].distances = {10, 32, 16};
  machine.numa_nodes[1].distances = {32, 10, 32};
  machine.numa_nodes[2].distances = {16, 32, 10};
  for (const char* pci : {"0000:01:00.0", "0000:02:00.0", "0000:03:00.0"}) {
    machine.gpus.push_back({.name = "GPU", .pci = pci, .numa_node = 0});
  }
  const RankPlacement placement = plan(machine, 3);
  EXPECT_EQ(placement.ranks[2].cores[0].cpus.numa_node, 2u);
  EXPECT_EQ(placement.ranks[2].cores[0].reason,
            "the nearest to its GPU with a core to spare (distance 16)");
  EXPECT_EQ(placement.ranks[2].gpu->reason, "on NUMA node 0; nearest to node 2 (distance 16)");
}

TEST(RankPlacement, AGpuOfUnknownNodeIsTakenAndSaidSo) {
  Machine machine = small_machine(2);
  machine.gpus = {{.name = "GPU", .pci = "0000:01:00.0", .numa_node = -1},
                  {.name = "GPU", .pci = "0000:02:00.0", .numa_node = -1}};
  const RankPlacement placement = plan(machine, 2);
  EXPECT_EQ(placement.ranks[1].cores[0].cpus.numa_node, 1u) << "ranks spread over the nodes";
  EXPECT_EQ(placement.ranks[0].gpu->reason, "its NUMA node is unknown");
}

TEST(RankPlacement, WarnsOfGpusOfDifferentModels) {
  Machine machine = small_machine(2);
  machine.gpus = {{.name = "fast", .pci = "0000:01:00.0", .numa_node = 0},
                  {.name = "slow", .pci = "0000:02:00.0", .numa_node = 1}};
  EXPECT_TRUE(warns_of(plan(machine, 2), "different models"));
  EXPECT_FALSE(warns_of(plan(machine, 1), "different models"));
}

TEST(RankPlacement, CoresOfANodeWithoutMemoryUseTheNearest) {
  Machine machine = small_machine(2);
  machine.numa_nodes[1].memory_bytes = 0;
  const RankPlacement placement = plan(machine, 2);
  EXPECT_EQ(placement.ranks[1].memory.at(0).numa_node, 0u);
  EXPECT_EQ(placement.ranks[1].memory[0].bytes, 500u);
  EXPECT_EQ(placement.ranks[1].memory[0].reason, "node 1 has no memory; this is the nearest");
}

TEST(RankPlacement, RefusesMoreRanksThanCores) {
  try {
    plan(small_machine(2), 5);
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_config);
    EXPECT_TRUE(std::string(error.what()).starts_with("5 ranks on this machine, but"))
        << error.what();
  }
}

}  // namespace
}  // namespace overspill
