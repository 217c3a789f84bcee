// Machines described by hwloc's XML files, and the one the tests run on.
#include "offload/topology.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <string>

#include "engine/base/error.h"
#include "engine/base/fd.h"
#include "tests/unit/offload/topology_files.h"

namespace overspill {
namespace {

class TopologyTest : public testing::Test {
 protected:
  void TearDown() override { ::unsetenv("HWLOC_XMLFILE"); }

  /// The machine of a file, or a skip of the test when the file is absent.
  void read(const char* name) {
    const std::filesystem::path path = test::topology_file(name);
    if (!std::filesystem::exists(path)) {
      GTEST_SKIP() << path << " is absent; set OVERSPILL_TEST_DATA to the folder of test data";
    }
    machine_ = read_machine(path);
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
  EXPECT_EQ(machine_.packages, 2u);
  ASSERT_EQ(machine_.numa_nodes.size(), 2u);
  EXPECT_EQ(machine_.numa_nodes[1].cpus, "24-25");
  EXPECT_EQ(machine_.numa_nodes[1].distances, (std::vector<uint32_t>{21, 10}));
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
  EXPECT_EQ(node_distance(machine_, 1, 3), 16u);
  EXPECT_EQ(node_distance(machine_, 1, 4), 32u);
  EXPECT_EQ(machine_.core_list.back().package, 1u);
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
  EXPECT_TRUE(machine_.numa_nodes[0].distances.empty());
  EXPECT_EQ(node_distance(machine_, 0, 2), 20u);
}

TEST_F(TopologyTest, CoresWithoutMemoryOfTheirOwnAreSharedEvenlyByTheNodes) {
  read("threadripper-2990wx-mixed-gpu-nvme.xml");
  if (IsSkipped()) return;
  ASSERT_EQ(machine_.core_list.size(), 32u);
  for (size_t i = 0; i < 32; ++i) EXPECT_EQ(machine_.core_list[i].numa_node, i < 16 ? 0u : 2u);
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

TEST_F(TopologyTest, TheFilesVariableDescribesAnotherHostToo) {
  const test::TemporaryPath file("epyc.xml");
  write_text_file(file.path(), test::Epyc9005Xml().text());
  ::setenv("HWLOC_XMLFILE", file.string().c_str(), 1);
  const Machine machine = read_machine();
  EXPECT_EQ(machine.cores, 128u);
  EXPECT_FALSE(machine.is_this_system);
}

TEST_F(TopologyTest, AHandWrittenEpyc9005IsReadInFull) {
  const test::TemporaryPath file("epyc.xml");
  write_text_file(file.path(), test::Epyc9005Xml().text());
  const Machine machine = read_machine(file.path());
  EXPECT_EQ(machine.cpu_model, "AMD EPYC 9575F 64-Core Processor");
  EXPECT_EQ(machine.packages, 2u);
  EXPECT_EQ(machine.hardware_threads, 256u);
  EXPECT_EQ(machine.l3_domains, 16u);
  EXPECT_EQ(machine.memory_bytes, uint64_t{1536} << 30);
  EXPECT_EQ(node_distance(machine, 0, 1), 32u);
  EXPECT_EQ(machine.core_list[64].cpus, (std::vector<uint32_t>{64, 192}));
  ASSERT_EQ(machine.gpus.size(), 4u);
  EXPECT_EQ(machine.gpus[2].pci, "0000:a1:00.0");
  EXPECT_EQ(machine.gpus[2].numa_node, 1);
  EXPECT_NE(machine.gpus[2].name.find("RTX PRO 6000 Blackwell"), std::string::npos);
  ASSERT_EQ(machine.drives.size(), 8u);
  for (size_t i = 0; i < 8; ++i) EXPECT_EQ(machine.drives[i].numa_node, i < 4 ? 0 : 1) << i;
}

// ---- saving ----

void expect_same_after_saving(const std::filesystem::path& from) {
  const test::TemporaryPath saved("saved.xml");
  save_topology(saved.path(), from);
  Machine before = read_machine(from);
  before.is_this_system = false;
  EXPECT_EQ(read_machine(saved.path()), before) << from;
}

TEST_F(TopologyTest, ThisMachineIsTheSameAfterSaving) { expect_same_after_saving({}); }

TEST_F(TopologyTest, AHandWrittenMachineIsTheSameAfterSaving) {
  const test::TemporaryPath file("epyc.xml");
  write_text_file(file.path(), test::Epyc9005Xml().text());
  expect_same_after_saving(file.path());
}

class RealHost : public testing::TestWithParam<const char*> {};

TEST_P(RealHost, IsTheSameAfterSaving) {
  const std::filesystem::path path = test::topology_file(GetParam());
  if (!std::filesystem::exists(path)) GTEST_SKIP() << path << " is absent";
  expect_same_after_saving(path);
}

INSTANTIATE_TEST_SUITE_P(Topology, RealHost,
                         testing::Values("dgx2-16gpu.xml", "epyc-7401x2-nps4-4gpu-nvme.xml",
                                         "epyc-7402x2-8gpu-nvme.xml",
                                         "threadripper-2990wx-mixed-gpu-nvme.xml"));

TEST_F(TopologyTest, SavingWhereNothingCanBeWrittenIsAnError) {
  EXPECT_THROW(save_topology("/nonexistent/host.xml"), Error);
}

// ---- files that are no topology ----

std::string refusal(const std::filesystem::path& xml) {
  try {
    read_machine(xml);
    return "accepted";
  } catch (const Error& error) {
    return fmt::format("{}: {}", error_code_name(error.code()), error.what());
  }
}

TEST_F(TopologyTest, FilesThatAreNoTopologyAreRefusedWithTheReason) {
  const std::string xml = test::Epyc9005Xml().text();
  std::string newer = xml;
  newer.replace(newer.find("version=\"2.0\""), 13, "version=\"3.1\"");
  const std::pair<std::string, const char*> kBad[] = {
      {"", "is not an XML file of hwloc"},
      {"no topology\n", "is not an XML file of hwloc"},
      {xml.substr(0, xml.size() / 2), "is cut short or damaged"},
      {newer, "has hwloc's XML version 3.1, and versions 1 and 2 can be read"}};
  for (const auto& [text, reason] : kBad) {
    const test::TemporaryPath file("bad.xml");
    write_text_file(file.path(), text);
    const std::string message = refusal(file.path());
    EXPECT_TRUE(message.starts_with("invalid_file: topology " + file.string())) << message;
    EXPECT_NE(message.find(reason), std::string::npos) << message;
  }
  EXPECT_TRUE(refusal("/nonexistent/host.xml").starts_with("not_found: ")) << "absent";
  EXPECT_TRUE(refusal("/").starts_with("invalid_file: ")) << "a directory";
}

TEST_F(TopologyTest, BadFileOfTheVariableIsRefusedAndNotReplacedByThisMachine) {
  const test::TemporaryPath file("bad.xml");
  write_text_file(file.path(), "no topology\n");
  for (const std::string& name : {file.string(), std::string("/nonexistent/topology.xml")}) {
    ::setenv("HWLOC_XMLFILE", name.c_str(), 1);
    const std::string message = refusal({});
    EXPECT_NE(message.find(name), std::string::npos) << message;
    EXPECT_NE(message.find("unset HWLOC_XMLFILE"), std::string::npos) << message;
  }
}

TEST(MemlockLimit, IsPositive) { EXPECT_GT(memlock_limit_bytes(), 0u); }

}  // namespace
}  // namespace overspill
