// A temporary directory for one test, and small disks made of loop devices inside it; all of it is
// undone at the end.
#pragma once

#include <gtest/gtest.h>
#include <stdio.h>
#include <stdlib.h>

#include <array>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace overspill::test {

class DiskTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = std::filesystem::temp_directory_path() / "overspill-test-XXXXXX";
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    root_ = name;
  }
  void TearDown() override {
    for (auto command = undo_.rbegin(); command != undo_.rend(); ++command) {
      EXPECT_TRUE(shell(*command)) << *command;
    }
    std::filesystem::remove_all(root_);
  }

  /// The trimmed output of a shell command, or nothing when it failed.
  static std::optional<std::string> shell(const std::string& command) {
    FILE* pipe = popen((command + " 2>/dev/null").c_str(), "r");
    if (pipe == nullptr) return std::nullopt;
    std::string output;
    std::array<char, 256> line;
    while (fgets(line.data(), line.size(), pipe) != nullptr) output += line.data();
    if (pclose(pipe) != 0) return std::nullopt;
    while (!output.empty() && output.back() == '\n') output.pop_back();
    return output;
  }

  /// Mounts a new ext4 of `mebibytes`, backed by root_/disk, on root_/small; false when not
  /// permitted.
  bool mount_small_disk(int mebibytes) {
    const std::string disk = root_ / "disk", mounted = root_ / "small";
    std::filesystem::create_directory(mounted);
    if (!shell("truncate -s " + std::to_string(mebibytes) + "M " + disk)) return false;
    if (!shell("mkfs.ext4 -q -m 0 -O ^has_journal " + disk)) return false;
    const auto device = shell("losetup -f --show " + disk);
    if (!device) return false;
    undo_.push_back("losetup -d " + *device);
    if (!shell("mount " + *device + " " + mounted)) return false;
    // A deleted swap file that something still holds open makes the first one fail.
    undo_.push_back("umount " + mounted + " || { umount -l " + mounted + "; false; }");
    return true;
  }

  std::filesystem::path root_;
  std::vector<std::string> undo_;  ///< shell commands, run in reverse
};

}  // namespace overspill::test
