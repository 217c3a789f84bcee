// Hardware profiles: what is written is what is read, and a damaged file is refused.
#include "engine/plan/profile_file.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <string>

#include "engine/base/error.h"
#include "engine/base/fd.h"
#include "engine/base/units.h"
#include "engine/train/config.h"

namespace overspill {
namespace {

class ProfileFileTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern =
        (std::filesystem::temp_directory_path() / "overspill-profile-XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    directory_ = pattern;
  }
  void TearDown() override { std::filesystem::remove_all(directory_); }

  std::filesystem::path path() const { return directory_ / "drives.yaml"; }

  std::string refusal(const std::string& text) const {
    write_text_file(path(), text);
    try {
      load_profile(path());
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_config);
      const std::string message = error.what();
      return message.substr(std::min(message.size(), directory_.string().size() + 1));
    }
    return "(accepted)";
  }

  std::filesystem::path directory_;
};

HardwareProfile measured() {
  HardwareProfile p;
  p.name = "a \"test\" machine";
  p.sources = {"a benchmark", "https://example.org/a: b"};
  p.device = {.name = "GPU",
              .count = 4,
              .accelerator = true,
              .memory = 96'000'000'000,
              .memory_bandwidth = 1.75e12,
              .peak_flops = 5e14,
              .compute = {{OpKind::backward, 4e6, 512, 1.5e11}, {OpKind::loss, 4e6, 1, 2e11}},
              .gemm = {{512, 4096, 1024, 2.5e11}},
              .reduce_gradient = 1e12,
              .export_gradient = 2e12};
  p.link = {55e9, 56e9, 50e9, 51e9, 114e9, 115e9, 2e-5};
  p.host = {.memory = 1152 * kGiB,
            .memory_bandwidth = 5e11,
            .cores = 64,
            .numa_distances = {{10, 32}, {32, 10}},
            .updates = {{OptimizerKind::lion, StateFormat::int8, 1.25e9}},
            .update_latency = 3e-5};
  p.drives = {.count = 8,
              .read = 3.25e9,
              .write = 1.5e9,
              .mixed_read = 2.5e9,
              .mixed_write = 1.25e9,
              .latency = 2.5e-4,
              .cpu_seconds_per_gb = 0.03,
              .capacity = kTiB,
              .endurance = 500 * kTiB,
              .settings = DriveSettings{4 * kMiB, 4, 16}};
  p.collective = {4e9, 3e9, 1e-4};
  return p;
}

TEST_F(ProfileFileTest, ReadsWhatItWrote) {
  save_profile(path(), measured(), "a test\nof two lines");
  EXPECT_TRUE(read_text_file(path()).starts_with("# a test\n# of two lines\nversion: 2\n"));
  EXPECT_EQ(load_profile(path()), measured());
}

TEST_F(ProfileFileTest, WritesOnlyWhatDiffersFromTheDefaults) {
  HardwareProfile profile;
  profile.drives.read = 3e9;
  EXPECT_EQ(profile_text(profile, "x"), "# x\nversion: 2\ndrives:\n  read: 3e+09\n");
  EXPECT_EQ(profile_text({}, "x"), "# x\nversion: 2\n");
}

TEST_F(ProfileFileTest, AcceptsUnitsOfBytes) {
  write_text_file(path(), "version: 2\nlink: {h2d: 55GB}\nhost: {memory: 1.5TiB}\n");
  EXPECT_DOUBLE_EQ(load_profile(path()).link.h2d, 55e9);
  EXPECT_EQ(load_profile(path()).host.memory, 3 * kTiB / 2);
}

TEST_F(ProfileFileTest, FlowsOfWhichOnlyEachAloneIsKnownTakeTurns) {
  write_text_file(path(), "version: 2\ndrives: {read: 4GB, write: 2GB, mixed_write: 2GB}\n");
  EXPECT_DOUBLE_EQ(load_profile(path()).drives.mixed_read, 2e9);
  EXPECT_DOUBLE_EQ(load_profile(path()).drives.mixed_write, 2e9);
}

TEST_F(ProfileFileTest, RefusesDamagedFiles) {
  const std::string hint = "; `overspill bench all --profile` writes such files";
  EXPECT_EQ(
      refusal("version: 2\ndrive: {}\n"),
      "drives.yaml:2: a hardware profile: unknown key \"drive\" (did you mean \"drives\"?)" + hint);
  EXPECT_EQ(refusal("version: 1\n"),
            "drives.yaml:1: a hardware profile of version 2 is needed (version: 2); write the file "
            "anew with `overspill bench all --profile`");
  EXPECT_EQ(refusal("version: 2\ndrives:\n  read: -1\n"),
            "drives.yaml:3: read must be a number from 0 to 1e+18" + hint);
  EXPECT_EQ(refusal("version: 2\ndrives: {write: 0}\n"),
            "drives.yaml:2: write must be at least 1" + hint);
  EXPECT_EQ(refusal("version: 2\nlink: {h2d: fast}\n"),
            "drives.yaml:2: h2d must be a number, or one with a unit such as 55GB" + hint);
  EXPECT_EQ(refusal("version: 2\nhost: {numa_distances: [10, 20]}\n"),
            "drives.yaml:2: numa_distances must be a list of lists" + hint);
  EXPECT_EQ(refusal("version: 2\nhost:\n  updates:\n    - {optimizer: adam, state: int8}\n"),
            "drives.yaml:4: optimizer must be one of adamw, lion, sgd, adafactor" + hint);
  const std::string depths =
      "version: 2\ndrives:\n  settings: {read_depth: 1, write_depth: 1, block_size: ";
  EXPECT_EQ(
      refusal(depths + "1000}\n"),
      "drives.yaml:3: block_size 1000 must be a multiple of 4096 of at most 64.00 MiB" + hint);
  EXPECT_EQ(refusal("version: 2\ndrives: {settings: {block_size: 4096, read_depth: 1}}\n"),
            "drives.yaml:2: read_depth and write_depth must be integers from 1 to 1024" + hint);
  EXPECT_EQ(refusal("version: 2\nlink: {h2d: 1GB, h2d: 2GB}\n"),
            "drives.yaml:2: link: \"h2d\" is there twice" + hint);
  EXPECT_EQ(refusal("version: 2\ndrives: {latency: 1e300}\n"),
            "drives.yaml:2: latency must be a number from 0 to 1e+18" + hint);
  EXPECT_EQ(refusal("version: 2\nhost: {numa_distances: [[10, 20]]}\n"),
            "drives.yaml:2: numa_distances must be as long as wide" + hint);
  EXPECT_EQ(
      refusal("version: 2\ndevice: {accelerator: true, memory: 8GB}\n"),
      "drives.yaml: device: an accelerator needs memory, and peak_flops or compute; add them");
  EXPECT_TRUE(refusal("version: [2\n").starts_with("drives.yaml:2: not valid YAML"));
  EXPECT_EQ(refusal("just text\n"), "drives.yaml:1: a hardware profile must be a mapping" + hint);
}

class ProfileConfigTest : public ProfileFileTest {
 protected:
  TrainConfig load(const std::string& offload) const {
    write_text_file(directory_ / "run.yaml",
                    "base_model: model\ndatasets: [{path: train.bin}]\nsequence_len: 128\n"
                    "learning_rate: 2e-5\noutput_dir: out\noffload:\n" +
                        offload);
    return load_train_config(directory_ / "run.yaml");
  }
};

TEST_F(ProfileConfigTest, GivesTheDefaultsOfIo) {
  save_profile(path(), measured(), "a test");
  const TrainConfig config = load("  nvme_paths: [a, b]\n  hardware_profile: drives.yaml\n");
  ASSERT_TRUE(config.offload.hardware_profile.has_value());
  EXPECT_DOUBLE_EQ(config.offload.hardware_profile->drives.read, 3.25e9);
  EXPECT_EQ(config.offload.io.block_size, 4 * kMiB);
  EXPECT_EQ(config.offload.io.queue_depth, 32u);  // of both drives together
  EXPECT_EQ(config.offload.io.write_depth, 16u);  // of each
}

TEST_F(ProfileConfigTest, WhatTheFileSaysWinsOverTheProfile) {
  save_profile(path(), measured(), "a test");
  const TrainConfig config =
      load("  io: {block_size: 2MiB, queue_depth: 3}\n  hardware_profile: drives.yaml\n");
  EXPECT_EQ(config.offload.io.block_size, 2 * kMiB);
  EXPECT_EQ(config.offload.io.queue_depth, 3u);
}

TEST_F(ProfileConfigTest, NamesAProfileThatDoesNotExist) {
  try {
    load("  hardware_profile: absent.yaml\n");
    FAIL() << "accepted";
  } catch (const Error& error) {
    const std::string message = error.what();
    EXPECT_NE(message.find("offload.hardware_profile: found"), std::string::npos) << message;
    EXPECT_NE(message.find("absent.yaml, which does not exist"), std::string::npos) << message;
  }
}

}  // namespace
}  // namespace overspill
