// `overspill bench copy`, `optimizer`, `compute`, `collective` and `all` as commands, with tiny
// measurements: what they write, what they refuse, and how Ctrl-C ends them.
#include <gtest/gtest.h>

#include <csignal>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>

#include "engine/plan/profile_file.h"
#include "tests/emulation/fake_runtime_access.h"
#include "tests/fault/child_process.h"

namespace overspill {
namespace {

namespace fs = std::filesystem;
using test::Child;

constexpr const char* kNoGpus = "OVERSPILL_CUDART=/nowhere/libcudart.so";

class BenchCommandTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = fs::temp_directory_path() / "overspill-bench-test-XXXXXX";
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    root_ = name;
    for (const char* directory : {"out", "drive", "files"}) fs::create_directory(root_ / directory);
  }
  void TearDown() override { fs::remove_all(root_); }

  fs::path file(const char* name) const { return root_ / "files" / name; }

  /// The benchmark with tiny sizes and all three outputs.
  std::vector<std::string> words(const std::string& benchmark,
                                 const std::vector<std::string>& more = {}) const {
    std::vector<std::string> result = {"bench",     benchmark,      "--seconds", "0.002",
                                       "--json",    file("r.json"), "--html",    file("r.html"),
                                       "--profile", file("p.yaml")};
    const auto add = [&](const std::vector<std::string>& words) {
      result.insert(result.end(), words.begin(), words.end());
    };
    const bool all = benchmark == "all";
    if (benchmark != "collective") add({"--memory", "4MiB"});
    if (all || benchmark == "copy") add({"--copy-size", "16KiB,64KiB"});
    if (all || benchmark == "compute") {
      add({"--hidden-size", "256", "--tokens", "16", "--vocabulary", "512"});
    }
    add(more);
    return result;
  }
  /// Without the machine's own GPUs, unless the environment names others.
  Child::Result run(const std::vector<std::string>& words,
                    const std::vector<std::string>& environment = {kNoGpus}) {
    Child::Options options;
    options.environment = environment;
    return Child(root_ / "out", words, options).wait();
  }
  /// Runs a benchmark that must succeed; its JSON.
  nlohmann::json measure(const std::string& benchmark, const std::vector<std::string>& more = {}) {
    const Child::Result result = run(words(benchmark, more));
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_TRUE(test::bytes_of_file(file("r.html")).ends_with("</html>\n"));
    return nlohmann::json::parse(test::bytes_of_file(file("r.json")));
  }
  HardwareProfile profile() const { return load_profile(file("p.yaml")); }

  fs::path root_;
};

TEST_F(BenchCommandTest, CopyFillsTheLinkAndTheMemory) {
  const auto json = measure("copy");
  EXPECT_EQ(json.at("copy").at("devices").at(0).at("results").size(), 4u);
  const HardwareProfile usual;
  const HardwareProfile measured = profile();
  EXPECT_NE(measured.link, usual.link);
  EXPECT_NE(measured.host.memory_bandwidth, usual.host.memory_bandwidth);
  EXPECT_GT(measured.host.memory, uint64_t{64} << 20);
  EXPECT_EQ(measured.device, usual.device);
  EXPECT_FALSE(measured.name.empty());
}

TEST_F(BenchCommandTest, CopyMeasuresEveryGpuOrSaysWhyThereIsNone) {
  if (!test::fake_cuda_is_built()) GTEST_SKIP() << "built without CUDA's headers";
  const Child::Result result = run(
      words("copy"), {"OVERSPILL_CUDART=" OVERSPILL_FAKE_CUDART, "OVERSPILL_FAKE_CUDA_DEVICES=2"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_NE(result.out.find("copies of GPU 1 (Fake GPU 1)"), std::string::npos) << result.out;
  const auto json = nlohmann::json::parse(test::bytes_of_file(file("r.json"))).at("copy");
  EXPECT_EQ(json.at("devices").size(), 2u);
  EXPECT_GT(json.at("all_both_d2h_bytes_per_second"), 0);
  EXPECT_EQ(profile().device.count, 2u);
  EXPECT_GT(profile().link.all_d2h, 0);
  const Child::Result without = run(words("copy"));
  EXPECT_EQ(without.exit_code, 0) << without.err;
  EXPECT_NE(without.out.find("copies of host (discrete)"), std::string::npos) << without.out;
  EXPECT_NE(without.out.find("the device is the host: "), std::string::npos) << without.out;
}

TEST_F(BenchCommandTest, OptimizerFillsTheRatesOfEveryRule) {
  const auto json = measure("optimizer");
  const HardwareProfile measured = profile();
  ASSERT_EQ(measured.host.updates.size(), 7u);
  EXPECT_EQ(json.at("optimizer").at("updates").size(), 7u);
  for (const UpdateRate& rate : measured.host.updates) EXPECT_GT(rate.parameters_per_second, 1e5);
  EXPECT_EQ(json.at("optimizer").at("scaling").back().at("threads"),
            json.at("optimizer").at("threads"));
}

TEST_F(BenchCommandTest, ComputeFillsPointsOfEveryOp) {
  const auto json = measure("compute");
  EXPECT_EQ(json.at("compute").at("products").size(), 4u);
  const HardwareProfile measured = profile();
  ASSERT_EQ(measured.device.compute.size(), 3u);
  for (const ComputePoint& point : measured.device.compute) {
    EXPECT_GT(point.flops_per_second, 1e6);
    EXPECT_GE(measured.device.peak_flops, point.flops_per_second * (1 - 1e-5));
  }
  EXPECT_EQ(measured.device.gemm.size(), 4u);
}

TEST_F(BenchCommandTest, CollectiveSaysThatOneRankHasNone) {
  const auto json = measure("collective");
  EXPECT_EQ(json.at("collective").at("measured"), false);
  EXPECT_EQ(profile().collective, CollectiveProfile{});
  const Child::Result result = run({"bench", "collective"});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_NE(result.out.find("one rank"), std::string::npos) << result.out;
}

TEST_F(BenchCommandTest, OneKeepsWhatOthersMeasured) {
  std::ofstream(file("p.yaml")) << "version: 2\nname: mine\nsources: [\"a data sheet\"]\n"
                                   "collective: {all_gather: 3e9}\n";
  measure("optimizer");
  const HardwareProfile before = profile();
  measure("copy");
  const HardwareProfile after = profile();
  EXPECT_EQ(after.host.updates, before.host.updates);
  EXPECT_EQ(after.name, "mine");
  EXPECT_EQ(after.collective.all_gather, 3e9);
  ASSERT_EQ(after.sources.size(), 3u);
  EXPECT_EQ(after.sources[0], "a data sheet");
  EXPECT_TRUE(after.sources[2].starts_with("copy: ")) << after.sources[2];
}

TEST_F(BenchCommandTest, AllMeasuresEverythingIntoOneOfEach) {
  const auto json = measure("all", {"--path", root_ / "drive", "--size", "4MiB", "--block-size",
                                    "64KiB", "--queue-depth", "1,4"});
  for (const char* section : {"nvme", "copy", "optimizer", "compute", "collective", "contention"}) {
    EXPECT_TRUE(json.contains(section)) << section;
  }
  EXPECT_EQ(json.at("contention").at("pairs").size(), 3u);
  for (const auto& pair : json.at("contention").at("pairs")) EXPECT_GT(pair.at("first_part"), 0);
  const HardwareProfile measured = profile();
  EXPECT_TRUE(measured.drives.settings.has_value());
  EXPECT_GT(measured.drives.cpu_seconds_per_gb, 0);
  EXPECT_FALSE(measured.host.updates.empty());
  EXPECT_FALSE(measured.device.compute.empty());
  EXPECT_EQ(measured.sources.size(), 4u);
  EXPECT_TRUE(fs::is_empty(root_ / "drive"));
}

TEST_F(BenchCommandTest, AllWithoutPathsLeavesDrivesOut) {
  const Child::Result result = run(words("all"));
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_NE(result.out.find("nvme: not measured"), std::string::npos) << result.out;
  EXPECT_EQ(profile().drives, DrivesProfile{});
}

TEST_F(BenchCommandTest, CtrlCEndsItAndWritesNothing) {
  for (const char* benchmark : {"copy", "optimizer", "compute", "all"}) {
    std::vector<std::string> arguments = words(benchmark);
    arguments[3] = "3";  // seconds of a point
    Child::Options options;
    options.environment = {kNoGpus};
    Child child(root_ / "out", arguments, options);
    ASSERT_TRUE(child.wait_until([&] {
      for (const auto& entry : fs::directory_iterator(root_ / "out")) {
        if (test::bytes_of_file(entry.path()).find("[1/") != std::string::npos) return true;
      }
      return false;
    })) << benchmark;
    child.send(SIGINT);
    const Child::Result result = child.wait(30);
    EXPECT_FALSE(result.timed_out) << benchmark;
    EXPECT_EQ(result.exit_code, 130) << benchmark << result.err;
    EXPECT_NE(result.err.find("interrupted"), std::string::npos) << result.err;
    EXPECT_TRUE(fs::is_empty(root_ / "files")) << benchmark;
    for (const auto& entry : fs::directory_iterator(root_ / "out")) fs::remove(entry.path());
  }
}

TEST_F(BenchCommandTest, RefusesBeforeItMeasures) {
  const auto refusal = [&](const std::string& benchmark, const std::vector<std::string>& more) {
    std::vector<std::string> arguments = {"bench", benchmark};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const Child::Result result = run(arguments);
    EXPECT_EQ(result.err.find("[1/"), std::string::npos) << result.err;
    return result.exit_code;
  };
  for (const char* benchmark : {"copy", "optimizer", "compute", "collective", "all"}) {
    for (const char* option : {"--json", "--html", "--profile"}) {
      EXPECT_EQ(refusal(benchmark, {option, root_ / "absent" / "file"}), 2) << benchmark << option;
      EXPECT_EQ(refusal(benchmark, {option, root_}), 2) << benchmark << option;
    }
  }
  std::ofstream(file("p.yaml")) << "version: 2\nlink: {h2d: fast}\n";
  EXPECT_EQ(refusal("copy", {"--profile", file("p.yaml")}), 2);
  EXPECT_EQ(refusal("copy", {"--memory", "1KiB"}), 2);
  EXPECT_EQ(refusal("copy", {"--copy-size", "1KiB"}), 2);
  EXPECT_EQ(refusal("compute", {"--hidden-size", "300"}), 2);
  EXPECT_EQ(refusal("nothing", {}), 2);
}

}  // namespace
}  // namespace overspill
