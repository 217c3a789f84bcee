// Which drives are near: on descriptions of machines, and this machine's own paths.
#include "offload/drive_locality.h"

#include <gtest/gtest.h>

#include <filesystem>

namespace overspill {
namespace {

Machine two_nodes() {
  Machine machine;
  machine.numa_nodes = {{.index = 0, .memory_bytes = 1, .cpus = "0-3,8-11"},
                        {.index = 1, .memory_bytes = 1, .cpus = "4-7,12-15"}};
  for (const auto& [name, node] : {std::pair{"nvme0n1", 0}, {"nvme1n1", 1}, {"nvme2n1", -1}}) {
    machine.drives.push_back(
        {.name = name, .model = "", .size_bytes = 1, .numa_node = node, .rotational = false});
  }
  return machine;
}

int node_of(const std::vector<uint32_t>& cpus) { return node_of_cpus(two_nodes(), cpus); }

TEST(DriveLocality, FindsTheNodeThatHoldsAllCpus) {
  EXPECT_EQ(node_of({0, 3, 8, 11}), 0);
  EXPECT_EQ(node_of({15, 4}), 1);
  EXPECT_EQ(node_of({3, 4}), -1);
  EXPECT_EQ(node_of({99}), -1);
  EXPECT_EQ(node_of({}), -1);
  EXPECT_FALSE(allowed_cpus().empty());
}

TEST(DriveLocality, KeepsTheDrivesOfANodeInOrder) {
  const std::vector<std::string> drives = {"nvme1n1", "nvme0n1", "", "nvme2n1", "nvme0n1", "sda"};
  EXPECT_EQ(drives_on_node(drives, two_nodes(), 0), (std::vector<size_t>{1, 4}));
  EXPECT_EQ(drives_on_node(drives, two_nodes(), 1), (std::vector<size_t>{0}));
  EXPECT_TRUE(drives_on_node(drives, two_nodes(), -1).empty());
}

TEST(DriveLocality, NamesTheDriveBehindAPathThatIsNotThereYet) {
  EXPECT_EQ(drive_of("/proc"), "");
  const std::string drive = drive_of(std::filesystem::current_path());
  EXPECT_EQ(drive_of(std::filesystem::current_path() / "not" / "there"), drive);
  if (drive.empty()) GTEST_SKIP() << "the current directory is on no single drive";
  EXPECT_TRUE(std::filesystem::exists("/sys/block/" + drive)) << drive;
}

}  // namespace
}  // namespace overspill
