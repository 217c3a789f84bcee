// Swap files: the striped map, refusals, cleaning up, and reclaiming what dead runs left.
#include "nvme/volume.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <optional>

#include "engine/base/error.h"
#include "engine/base/units.h"

namespace overspill {
namespace {

namespace fs = std::filesystem;

class VolumeTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = fs::temp_directory_path() / "overspill-volume-XXXXXX";
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    root_ = name;
  }
  void TearDown() override { fs::remove_all(root_); }

  std::vector<fs::path> swap_files() const {
    std::vector<fs::path> found;
    for (const auto& entry : fs::recursive_directory_iterator(root_)) {
      if (entry.path().extension() == ".swap") found.push_back(entry.path());
    }
    return found;
  }

  /// The error that creating a volume ends in.
  static Error refusal(const VolumeOptions& options) {
    try {
      const Volume volume(options);
    } catch (const Error& error) {
      return error;
    }
    return {ErrorCode::internal, "the volume was created"};
  }

  /// Leaves the file of a run that was killed while it had a volume in `root_`.
  void leave_dead_run(uint64_t capacity_bytes) const {
    int ready[2];
    ASSERT_EQ(pipe(ready), 0);
    const pid_t child = fork();
    if (child == 0) {
      const Volume volume({.directories = {root_}, .capacity_bytes = capacity_bytes});
      if (write(ready[1], "", 1) != 1) _exit(1);
      for (;;) pause();
    }
    close(ready[1]);
    char byte;
    EXPECT_EQ(read(ready[0], &byte, 1), 1);
    close(ready[0]);
    kill(child, SIGKILL);
    int status = 0;
    waitpid(child, &status, 0);
  }

  fs::path root_;
};

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST_F(VolumeTest, MapsEachByteToItsOwnPlace) {
  for (const size_t count : {1u, 3u}) {
    VolumeOptions options{.directories = {}, .capacity_bytes = kMiB + 1, .stripe_bytes = 64 * kKiB};
    for (size_t i = 0; i < count; ++i) options.directories.push_back(root_ / std::to_string(i));
    const Volume volume(options);
    EXPECT_EQ(volume.capacity_bytes(), round_up(kMiB + 1, 64 * kKiB * count));
    std::vector<std::vector<bool>> used(count);
    for (auto& file : used) file.resize(volume.capacity_bytes() / count / 4096);
    for (uint64_t offset = 0; offset < volume.capacity_bytes(); offset += 4096) {
      const Volume::Place place = volume.place(offset);
      ASSERT_LT(place.file, count);
      ASSERT_GE(place.offset, 4096u) << "overwrites the header";
      ASSERT_GE(place.contiguous_bytes, 4096u);
      const size_t page = place.offset / 4096 - 1;
      ASSERT_LT(page, used[place.file].size()) << "beyond the file";
      ASSERT_FALSE(used[place.file][page]) << "two offsets share a page";
      used[place.file][page] = true;
      const uint64_t last = offset + place.contiguous_bytes - 4096;
      EXPECT_EQ(volume.place(last).file, place.file);
      EXPECT_EQ(volume.place(last).offset, place.offset + place.contiguous_bytes - 4096);
    }
  }
}

TEST_F(VolumeTest, PutsStripesOnFilesInTurn) {
  const Volume volume(
      {.directories = {root_ / "a", root_ / "b"}, .capacity_bytes = kMiB, .stripe_bytes = 8192});
  EXPECT_EQ(volume.place(0).file, 0u);
  EXPECT_EQ(volume.place(8192).file, 1u);
  EXPECT_EQ(volume.place(16384).file, 0u);
  EXPECT_EQ(volume.place(16384 + 4096).offset, 4096u + 8192 + 4096);
  EXPECT_EQ(volume.place(4096).contiguous_bytes, 4096u);
}

TEST_F(VolumeTest, AllocatesItsFilesWholeAndRemovesThem) {
  const fs::path made = root_ / "new" / "directory";
  {
    const Volume volume({.directories = {made}, .capacity_bytes = 8 * kMiB});
    ASSERT_EQ(swap_files().size(), 1u);
    const std::string name = swap_files()[0].filename();
    EXPECT_EQ(name.size(), std::string("overspill-0123456789abcdef.swap").size()) << name;
    struct stat status {};
    ASSERT_EQ(stat(swap_files()[0].c_str(), &status), 0);
    EXPECT_EQ(static_cast<uint64_t>(status.st_size), 8 * kMiB + 4096);
    EXPECT_GE(static_cast<uint64_t>(status.st_blocks) * 512, 8 * kMiB) << "not allocated";
    EXPECT_EQ(status.st_mode & 0777, 0600u);
  }
  EXPECT_TRUE(swap_files().empty());
}

TEST_F(VolumeTest, RefusesOneDirectoryTwice) {
  fs::create_directory(root_ / "a");
  fs::create_directory_symlink(root_ / "a", root_ / "link");
  const Error error =
      refusal({.directories = {root_ / "a", root_ / "link"}, .capacity_bytes = kMiB});
  EXPECT_EQ(error.code(), ErrorCode::invalid_config);
  EXPECT_EQ(std::string(error.what()),
            "offload.nvme_paths names one directory twice: " + (root_ / "a").string() + " and " +
                (root_ / "link").string() + "; name each drive once");
}

TEST_F(VolumeTest, RefusesNoDirectory) {
  EXPECT_EQ(refusal({.directories = {}, .capacity_bytes = kMiB}).code(), ErrorCode::invalid_config);
}

TEST_F(VolumeTest, RefusesMoreThanTheDriveHoldsAndLeavesNothing) {
  const Error error = refusal({.directories = {root_ / "ssd"}, .capacity_bytes = 1024 * kTiB});
  const std::string text = error.what();
  EXPECT_EQ(error.code(), ErrorCode::does_not_fit);
  EXPECT_TRUE(contains(text, (root_ / "ssd").string() + ": needs ")) << text;
  EXPECT_TRUE(contains(text, "(1125899906846720 bytes), ")) << text;  // with the header
  EXPECT_TRUE(contains(text,
                       " bytes) free; free space there, or set offload.nvme_paths to a "
                       "larger drive or to several drives"))
      << text;
  EXPECT_TRUE(fs::is_empty(root_)) << "left something behind";
}

TEST_F(VolumeTest, RemovesNewDirectoriesWhenALaterOneCannotBeMade) {
  std::ofstream(root_ / "file") << "not a directory";
  const Error error =
      refusal({.directories = {root_ / "new" / "good", root_ / "file"}, .capacity_bytes = kMiB});
  EXPECT_EQ(error.code(), ErrorCode::io);
  EXPECT_FALSE(fs::exists(root_ / "new"));
}

TEST_F(VolumeTest, NamesADirectoryThatCannotBeWritten) {
  fs::create_directory(root_ / "locked");
  fs::create_directory(root_ / "open");
  ASSERT_EQ(chmod(root_.c_str(), 0755), 0);
  ASSERT_EQ(chmod((root_ / "open").c_str(), 0777), 0);
  ASSERT_EQ(chmod((root_ / "locked").c_str(), 0555), 0);
  const bool root = geteuid() == 0;
  if (root) {
    ASSERT_EQ(seteuid(65534), 0);
  }
  const Error made = refusal({.directories = {root_ / "locked" / "new"}, .capacity_bytes = kMiB});
  const Error used =
      refusal({.directories = {root_ / "open", root_ / "locked"}, .capacity_bytes = kMiB});
  if (root) {
    ASSERT_EQ(seteuid(0), 0);
  }
  EXPECT_EQ(made.code(), ErrorCode::io);
  EXPECT_EQ(std::string(made.what()), "make directory " + (root_ / "locked" / "new").string() +
                                          ": Permission denied; set "
                                          "offload.nvme_paths to a directory that can be written");
  EXPECT_EQ(used.code(), ErrorCode::io);
  EXPECT_TRUE(contains(used.what(), ": Permission denied; the directory is not writable"))
      << used.what();
  EXPECT_TRUE(fs::is_empty(root_ / "open")) << "the first directory's file is still there";
}

TEST_F(VolumeTest, ReclaimsTheFileOfAKilledRun) {
  leave_dead_run(2 * kMiB);
  ASSERT_EQ(swap_files().size(), 1u);
  const fs::path dead = swap_files()[0];
  testing::internal::CaptureStderr();
  const Volume volume({.directories = {root_}, .capacity_bytes = kMiB});
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_FALSE(fs::exists(dead));
  EXPECT_TRUE(contains(log, "reclaimed 2.00 MiB of a dead run (pid ")) << log;
  EXPECT_TRUE(contains(log, dead.string())) << log;
  EXPECT_EQ(swap_files().size(), 1u);
}

TEST_F(VolumeTest, LeavesTheFileOfALiveRunAlone) {
  const Volume first({.directories = {root_}, .capacity_bytes = kMiB});
  const fs::path live = swap_files()[0];
  testing::internal::CaptureStderr();
  {
    const Volume second({.directories = {root_}, .capacity_bytes = kMiB});
    EXPECT_EQ(swap_files().size(), 2u);
  }
  EXPECT_FALSE(contains(testing::internal::GetCapturedStderr(), live.string()));
  EXPECT_EQ(swap_files(), std::vector<fs::path>{live});
}

TEST_F(VolumeTest, LeavesForeignFilesAlone) {
  const fs::path foreign = root_ / "overspill-0123456789abcdef.swap";
  std::ofstream(foreign) << "somebody's thesis";
  const fs::path empty = root_ / "overspill-empty.swap";
  std::ofstream(empty).flush();
  std::ofstream(root_ / "other.txt") << "x";
  fs::create_symlink(root_ / "other.txt", root_ / "overspill-link.swap");
  testing::internal::CaptureStderr();
  { const Volume volume({.directories = {root_}, .capacity_bytes = kMiB}); }
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_TRUE(contains(log, foreign.string() + " has the name of a swap file but not its content, "
                                               "so it is left alone"))
      << log;
  EXPECT_TRUE(fs::exists(foreign));
  EXPECT_EQ(fs::file_size(foreign), 17u);
  EXPECT_TRUE(fs::exists(empty));
  EXPECT_TRUE(fs::exists(root_ / "other.txt"));
  EXPECT_TRUE(fs::is_symlink(root_ / "overspill-link.swap"));
}

TEST_F(VolumeTest, SurvivesRunsThatStartAtOnceInOneDirectory) {
  constexpr int kRuns = 8;
  std::vector<pid_t> children;
  for (int run = 0; run < kRuns; ++run) {
    const pid_t child = fork();
    if (child == 0) {
      bool good = true;
      for (int i = 0; i < 10 && good; ++i) {
        const Volume volume({.directories = {root_}, .capacity_bytes = kMiB});
        usleep(1000);
        good = fs::exists(volume.files()[0].path());
      }
      _exit(good ? 0 : 1);
    }
    children.push_back(child);
  }
  for (const pid_t child : children) {
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0) << "a live run's file was deleted";
  }
  EXPECT_TRUE(swap_files().empty());
}

TEST_F(VolumeTest, WarnsOnceWhereThereIsNoDirectIo) {
  const fs::path memory = "/dev/shm";
  if (access(memory.c_str(), W_OK) != 0) GTEST_SKIP() << "no writable /dev/shm";
  std::string a = memory / "overspill-a-XXXXXX", b = memory / "overspill-b-XXXXXX";
  ASSERT_NE(mkdtemp(a.data()), nullptr);
  ASSERT_NE(mkdtemp(b.data()), nullptr);
  testing::internal::CaptureStderr();
  std::optional<bool> direct;
  {
    const Volume volume({.directories = {a, b}, .capacity_bytes = kMiB});
    direct = volume.direct();
  }
  const std::string log = testing::internal::GetCapturedStderr();
  fs::remove_all(a);
  fs::remove_all(b);
  EXPECT_EQ(direct, false);
  const size_t warning = log.find(" is on tmpfs, without O_DIRECT: pages go through the page");
  ASSERT_NE(warning, std::string::npos) << log;
  EXPECT_TRUE(contains(log, "set offload.nvme_paths to ext4 or xfs on a local drive")) << log;
  EXPECT_EQ(log.find("O_DIRECT", warning + 40), std::string::npos) << "warned twice: " << log;
}

}  // namespace
}  // namespace overspill
