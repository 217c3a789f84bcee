// `overspill bench nvme` on real files: a small run, what it refuses, and that nothing of it stays
// behind, whether it ends well, by an error or by Ctrl-C.
#include "engine/bench/nvme_benchmark.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>

#include "engine/base/error.h"
#include "engine/bench/drive_runner.h"
#include "engine/plan/profile_file.h"
#include "tests/fault/child_process.h"

namespace overspill {
namespace {

namespace fs = std::filesystem;
using test::Child;

class NvmeBenchmarkTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = fs::temp_directory_path() / "overspill-bench-test-XXXXXX";
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    root_ = name;
    for (const char* drive : {"a", "b"}) fs::create_directory(root_ / drive);
    fs::create_directory(root_ / "out");
  }
  void TearDown() override { fs::remove_all(root_); }

  NvmeBenchOptions small() const {
    NvmeBenchOptions options;
    options.paths = {root_ / "a"};
    options.bytes_per_path = 4 * kMiB;
    options.seconds_per_point = 0.002;
    options.block_sizes = {64 * kKiB, 128 * kKiB};
    options.depths = {1, 4};
    return options;
  }
  static NvmeBenchReport run(const NvmeBenchOptions& options) {
    const std::atomic<bool> stop{false};
    return run_nvme_benchmark(options, stop, [](size_t, size_t, const std::string&) {});
  }
  static std::string refusal(const NvmeBenchOptions& options, ErrorCode code) {
    try {
      run(options);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), code) << error.what();
      return error.what();
    }
    return "(accepted)";
  }
  bool nothing_left() const { return fs::is_empty(root_ / "a") && fs::is_empty(root_ / "b"); }

  fs::path root_;
};

TEST_F(NvmeBenchmarkTest, MeasuresEachPathAndAllTogether) {
  NvmeBenchOptions options = small();
  options.paths.push_back(root_ / "b");
  size_t last = 0, total = 0;
  const std::atomic<bool> stop{false};
  const NvmeBenchReport report =
      run_nvme_benchmark(options, stop, [&](size_t done, size_t all, const std::string&) {
        EXPECT_LE(last, done);
        EXPECT_LE(done, all);
        last = done;
        total = all;
      });
  EXPECT_EQ(last, total);
  ASSERT_EQ(report.targets.size(), 3u);
  for (const TargetResult& target : report.targets) {
    // Two block sizes, two depths, two orders, reads and writes; and four pairs of depths.
    EXPECT_EQ(target.results.size(), 16u + 4u);
    for (const BenchResult& result : target.results) {
      EXPECT_EQ(result.rates.read > 0, result.point.traffic != Traffic::write);
      EXPECT_EQ(result.rates.write > 0, result.point.traffic != Traffic::read);
    }
    EXPECT_GT(target.first_write_rate, 0);
    EXPECT_GT(target.best.mixed_read, 0);
  }
  EXPECT_EQ(report.targets[2].bytes, 8 * kMiB);
  EXPECT_TRUE(nothing_left());
}

TEST_F(NvmeBenchmarkTest, MeasuresWithChecksums) {
  NvmeBenchOptions options = small();
  options.verify = true;
  options.sequential = false;
  const NvmeBenchReport report = run(options);
  ASSERT_EQ(report.targets.size(), 1u);
  EXPECT_EQ(report.targets[0].results.size(), 8u + 4u);
  EXPECT_TRUE(nothing_left());
}

TEST_F(NvmeBenchmarkTest, RefusesToFillADisk) {
  NvmeBenchOptions options = small();
  options.disk_space = [](const fs::path&) -> DiskSpace {
    return {.used_bytes = 88 * kMiB, .available_bytes = 12 * kMiB};
  };
  EXPECT_EQ(refusal(options, ErrorCode::does_not_fit),
            "--path " + (root_ / "a").string() +
                ": 4.00 MiB more would fill its file system to 92 % (88.00 MiB in use, "
                "12.00 MiB available); a benchmark stays below 90 %: use --size of at most "
                "2.00 MiB, or free space there");
  options.bytes_per_path = kMiB;
  EXPECT_EQ(refusal(options, ErrorCode::does_not_fit), "(accepted)");
  // Two paths on one file system need room for both.
  options.paths.push_back(root_ / "b");
  options.bytes_per_path = 3 * kMiB / 2;
  EXPECT_NE(refusal(options, ErrorCode::does_not_fit).find("3.00 MiB more"), std::string::npos);
  EXPECT_TRUE(nothing_left());
}

TEST_F(NvmeBenchmarkTest, RefusesPathsItCannotUse) {
  NvmeBenchOptions options = small();
  options.paths = {root_ / "absent"};
  EXPECT_EQ(refusal(options, ErrorCode::not_found),
            "--path " + (root_ / "absent").string() +
                ": No such file or directory; name an existing directory on the drive to measure");
  EXPECT_FALSE(fs::exists(root_ / "absent"));
  std::ofstream(root_ / "file") << "text";
  options.paths = {root_ / "file"};
  EXPECT_NE(refusal(options, ErrorCode::invalid_config).find("is no directory"), std::string::npos);
  options.paths = {root_ / "a", root_ / "b" / ".." / "a"};
  EXPECT_NE(refusal(options, ErrorCode::invalid_config).find("a second time"), std::string::npos);
}

TEST_F(NvmeBenchmarkTest, RefusesAPathWithoutPermissionToWrite) {
  fs::permissions(root_, fs::perms(0755));
  fs::permissions(root_ / "a", fs::perms(0555));
  const std::vector<fs::path> paths = {root_ / "a"};
  const auto check = [&] {
    constexpr uid_t kNobody = 65534;  // root may write everywhere
    if (geteuid() == 0 && setuid(kNobody) != 0) std::_Exit(1);
    try {
      check_bench_paths(paths, kMiB);
    } catch (const Error& error) {
      std::fputs(error.what(), stderr);
      std::_Exit(3);
    }
    std::_Exit(0);
  };
  EXPECT_EXIT(check(), testing::ExitedWithCode(3), "no permission to create files there");
  fs::permissions(root_ / "a", fs::perms::owner_all);
}

TEST_F(NvmeBenchmarkTest, LeavesNothingAfterAnError) {
  BenchBuffers buffers(64 * kKiB, 2);
  DriveRunner::Options options{
      .directories = {root_ / "a", root_ / "b"}, .bytes_per_drive = kMiB, .io = {}};
  options.io.wrap = [](std::unique_ptr<AsyncIo> inner) {
    return make_faulty_io(std::move(inner), {.fail_request = 3, .error = ENODEV});
  };
  {
    DriveRunner runner(options, buffers);
    EXPECT_TRUE(nothing_left()) << "its files have names";
    EXPECT_THROW(runner.write_first(), Error);
  }
  EXPECT_TRUE(nothing_left());
}

TEST_F(NvmeBenchmarkTest, TouchesNoFilesOfOthers) {
  const fs::path mine = root_ / "a" / "overspill-0123456789abcdef.swap";
  std::ofstream(mine) << "OVSPSWAP looks like a dead run's swap file";
  run(small());
  EXPECT_TRUE(fs::exists(mine));
}

TEST_F(NvmeBenchmarkTest, CommandWritesTableJsonPageAndProfile) {
  const fs::path out = root_ / "out";
  Child child(out,
              {"bench", "nvme", "--path", root_ / "a", "--size", "4MiB", "--seconds", "0.01",
               "--block-size", "64KiB,128KiB", "--queue-depth", "1,4", "--json", out / "r.json",
               "--html", out / "r.html", "--profile", out / "p.yaml"},
              {});
  const Child::Result result = child.wait();
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_NE(result.out.find("use block size"), std::string::npos) << result.out;
  EXPECT_NE(result.err.find("[40/40] "), std::string::npos) << result.err;
  const auto json = nlohmann::json::parse(test::bytes_of_file(out / "r.json"));
  EXPECT_EQ(json.at("targets").size(), 1u);
  EXPECT_TRUE(test::bytes_of_file(out / "r.html").ends_with("</html>\n"));
  const HardwareProfile profile = load_profile(out / "p.yaml");
  ASSERT_TRUE(profile.drives.settings.has_value());
  EXPECT_EQ(profile.drives.settings->block_bytes,
            json.at("targets")[0].at("recommended").at("block_size"));
  EXPECT_TRUE(nothing_left());
}

TEST_F(NvmeBenchmarkTest, CtrlCEndsItAndLeavesNothing) {
  for (const int signal : {SIGINT, SIGKILL}) {
    Child child(root_ / "out",
                {"bench", "nvme", "--path", root_ / "a", "--size", "16MiB", "--seconds", "30"}, {});
    // Logged once files are made and have lost their names; points then take half a minute.
    ASSERT_TRUE(child.wait_until([&] {
      for (const auto& entry : fs::directory_iterator(root_ / "out")) {
        if (test::bytes_of_file(entry.path()).find("NVMe I/O uses ") != std::string::npos)
          return true;
      }
      return false;
    }));
    child.send(signal);
    const Child::Result result = child.wait(20);
    EXPECT_FALSE(result.timed_out);
    if (signal == SIGINT) {
      EXPECT_EQ(result.exit_code, 130) << result.err;
      EXPECT_NE(result.err.find("interrupted; its files are removed"), std::string::npos);
    }
    EXPECT_TRUE(nothing_left()) << "after signal " << signal;
  }
}

TEST_F(NvmeBenchmarkTest, CommandRefusesBadUsage) {
  const auto code = [&](const std::vector<std::string>& arguments) {
    std::vector<std::string> words = {"bench", "nvme"};
    words.insert(words.end(), arguments.begin(), arguments.end());
    return Child(root_ / "out", words, {}).wait().exit_code;
  };
  EXPECT_EQ(code({}), 2);
  EXPECT_EQ(code({"--path", root_ / "a", "--queue-depth", "0"}), 2);
  EXPECT_EQ(code({"--path", root_ / "a", "--block-size", "1000"}), 2);
  EXPECT_EQ(code({"--path", root_ / "a", "--size", "lots"}), 2);
  EXPECT_EQ(code({"--path", root_ / "a", "--json", root_ / "absent" / "r.json"}), 2);
  EXPECT_EQ(code({"--path", root_ / "absent"}), 1);
  EXPECT_EQ(code({"--help"}), 0);
  EXPECT_TRUE(nothing_left());
}

}  // namespace
}  // namespace overspill
