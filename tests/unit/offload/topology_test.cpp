// Machines described by hwloc's XML files, and the one the tests run on.
#include "offload/topology.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <string>

#include "engine/base/error.h"
#include "engine/base/fd.h"

namespace overspill {
namespace {

std::filesystem::path topologies() {
  const char* const root = std::getenv("OVERSPILL_TEST_DATA");
  return std::filesystem::path(root ? root : OVERSPILL_SOURCE_DIR "/../shared/data") / "topologies";
}

class TopologyTest : public testing::Test {
 protected:
  void TearDown() override { ::unsetenv("HWLOC_XMLFILE"); }

  /// The machine of a file, or a skip of the test when the file is absent.
  void read(const char* name) {
    const std::filesystem::path path = topologies() / name;
    if (!std::filesystem::exists(path)) {
      GTEST_SKIP() << path << " is absent; set OVERSPILL_TEST_DATA to the folder of test data";
    }
    ::setenv("HWLOC_XMLFILE", path.c_str(), 1);
    machine_ = read_machine();
  }

  const Drive& drive(const std::string& name) const {
    const auto found = std::ranges::find(machine_.drives, name, &Drive::name);
    EXPECT_NE(found, machine_.drives.end()) << name;
    static const Drive kNone{};
    return found == machine_.drives.end() ? kNone : *found;
  }

  Machine machine_;
};

TEST_F(TopologyTest, SixteenGpusOnTwoNodesWithoutDrives) {
  read("dgx2-16gpu.xml");
  if (IsSkipped()) return;
  EXPECT_EQ(machine_.cpu_model, "Intel(R) Xeon(R) Platinum 8174 CPU @ 3.10GHz");
  EXPECT_EQ(machine_.cores, 4u);  // the file was cut down to four cores
  EXPECT_EQ(machine_.memory_bytes, 810234351616u + 811737923584u);
  ASSERT_EQ(machine_.numa_nodes.size(), 2u);
  EXPECT_EQ(machine_.numa_nodes[1].cpus, "24-25");
  EXPECT_TRUE(machine_.drives.empty()) << "this machine's drives leaked into another's";
  ASSERT_EQ(machine_.gpus.size(), 16u);
  for (size_t i = 0; i < 16; ++i) EXPECT_EQ(machine_.gpus[i].numa_node, i < 8 ? 0 : 1) << i;
  EXPECT_EQ(machine_.gpus[0].name, "NVIDIA Corporation Tesla V100-SXM3-32GB-H");
  EXPECT_EQ(machine_.gpus[0].pci, "0000:34:00.0");
}

TEST_F(TopologyTest, EightNodesFourGpusAndOneDrive) {
  read("epyc-7401x2-nps4-4gpu-nvme.xml");
  if (IsSkipped()) return;
  EXPECT_EQ(machine_.cores, 48u);
  EXPECT_EQ(machine_.hardware_threads, 96u);
  EXPECT_EQ(machine_.l2_bytes, 512u << 10);
  EXPECT_EQ(machine_.l3_bytes, 8u << 20);
  EXPECT_EQ(machine_.l3_domains, 16u);
  ASSERT_EQ(machine_.numa_nodes.size(), 8u);
  EXPECT_EQ(machine_.numa_nodes[3].cpus, "18-23,66-71");
  EXPECT_EQ(machine_.numa_nodes[0].memory_bytes, 34243170304u);
  ASSERT_EQ(machine_.gpus.size(), 4u) << "the console's display controller is no GPU";
  EXPECT_EQ(machine_.gpus[2].numa_node, 5);
  ASSERT_EQ(machine_.drives.size(), 1u);
  EXPECT_EQ(drive("nvme0n1").model, "HUSMR7616BDP301");
  EXPECT_EQ(drive("nvme0n1").size_bytes, 0u);  // the file does not say
  EXPECT_EQ(drive("nvme0n1").numa_node, 0);
}

TEST_F(TopologyTest, DriveSizesAndDrivesWithoutLocality) {
  read("epyc-7402x2-8gpu-nvme.xml");
  if (IsSkipped()) return;
  EXPECT_EQ(machine_.cpu_model, "AMD EPYC 7402 24-Core Processor");
  EXPECT_EQ(machine_.gpus.size(), 8u);
  ASSERT_EQ(machine_.drives.size(), 3u);
  EXPECT_EQ(drive("nvme0n1").size_bytes, 3840755982336u);
  EXPECT_EQ(drive("nvme0n1").numa_node, 0);
  EXPECT_EQ(drive("sda").numa_node, -1);
}

TEST_F(TopologyTest, NodeNumbersAreTheSystemsAndMayHaveGaps) {
  read("threadripper-2990wx-mixed-gpu-nvme.xml");
  if (IsSkipped()) return;
  ASSERT_EQ(machine_.numa_nodes.size(), 2u);
  EXPECT_EQ(machine_.numa_nodes[1].index, 2u);
  EXPECT_EQ(drive("nvme0n1").numa_node, 2);
  EXPECT_EQ(drive("sda").numa_node, 0);
  ASSERT_EQ(machine_.gpus.size(), 2u);
  EXPECT_EQ(machine_.gpus[0].name, "NVIDIA Corporation GeForce GTX 1070");
  EXPECT_EQ(machine_.gpus[1].numa_node, 2);
}

TEST_F(TopologyTest, ThisMachineHasProcessorsAndMemory) {
  const Machine machine = read_machine();
  EXPECT_GE(machine.hardware_threads, 1u);
  EXPECT_GE(machine.hardware_threads, machine.cores);
  EXPECT_GT(machine.memory_bytes, 64u << 20);
  ASSERT_FALSE(machine.numa_nodes.empty());
  EXPECT_FALSE(machine.numa_nodes[0].cpus.empty());
  for (const Drive& one : machine.drives) {
    EXPECT_FALSE(one.name.starts_with("loop") || one.name.starts_with("zram")) << one.name;
  }
}

TEST_F(TopologyTest, BadTopologyFileIsRefusedAndNotReplacedByThisMachine) {
  const std::filesystem::path path =
      std::filesystem::temp_directory_path() / ("overspill-topology-" + std::to_string(::getpid()));
  write_text_file(path, "no topology\n");
  for (const std::string& name : {path.string(), std::string("/nonexistent/topology.xml")}) {
    ::setenv("HWLOC_XMLFILE", name.c_str(), 1);
    try {
      read_machine();
      ADD_FAILURE() << name << " was accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::io);
      const std::string message = error.what();
      EXPECT_NE(message.find(name), std::string::npos) << message;
      EXPECT_NE(message.find("unset HWLOC_XMLFILE"), std::string::npos) << message;
    }
  }
  std::filesystem::remove(path);
}

TEST(MemlockLimit, IsPositive) { EXPECT_GT(memlock_limit_bytes(), 0u); }

}  // namespace
}  // namespace overspill
