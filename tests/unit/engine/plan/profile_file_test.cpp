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
  HardwareProfile profile = default_profile();
  profile.drives = DriveSettings{4 * kMiB, 4, 16};
  profile[OpKind::read] = {3.25e9, 0};
  profile[OpKind::write] = {1.5e9, 2.5e-4};
  return profile;
}

TEST_F(ProfileFileTest, ReadsWhatItWrote) {
  const HardwareProfile written = measured();
  save_profile(path(), written, std::array{OpKind::read, OpKind::write}, "a test");
  const HardwareProfile read = load_profile(path());
  EXPECT_EQ(read.drives, written.drives);
  for (size_t kind = 0; kind < kOpKinds; ++kind) {
    EXPECT_DOUBLE_EQ(read.rates[kind].work_per_second, written.rates[kind].work_per_second);
    EXPECT_DOUBLE_EQ(read.rates[kind].latency_seconds, written.rates[kind].latency_seconds);
  }
}

TEST_F(ProfileFileTest, KindsThatWereNotMeasuredKeepTheirDefaults) {
  HardwareProfile profile = measured();
  profile[OpKind::forward] = {1, 1};
  save_profile(path(), profile, std::array{OpKind::read}, "a test");
  EXPECT_DOUBLE_EQ(load_profile(path())[OpKind::forward].work_per_second,
                   default_profile()[OpKind::forward].work_per_second);
}

TEST_F(ProfileFileTest, RefusesDamagedFiles) {
  const std::string anew = "; write the file anew with `overspill bench nvme --profile`";
  EXPECT_EQ(
      refusal("version: 1\nrate: {}\n"),
      "drives.yaml:2: a hardware profile: unknown key \"rate\" (did you mean \"rates\"?)" + anew);
  EXPECT_EQ(refusal("version: 2\n"), "drives.yaml:1: version must be 1" + anew);
  EXPECT_EQ(refusal("version: 1\nrates:\n  read: {work_per_second: -1, latency_seconds: 0}\n"),
            "drives.yaml:3: work_per_second must be a number of at least 0.001" + anew);
  EXPECT_EQ(refusal("version: 1\nnvme:\n  block_size: 1000\n  read_depth: 1\n  write_depth: 1\n"),
            "drives.yaml:3: block_size 1000 is no multiple of 4096" + anew);
  EXPECT_EQ(refusal("version: 1\nnvme: {block_size: 4096, read_depth: 1}\n"),
            "drives.yaml:2: write_depth must be an integer from 1 to 1024" + anew);
  EXPECT_TRUE(refusal("version: [1\n").starts_with("drives.yaml:2: not valid YAML"));
  EXPECT_EQ(refusal("just text\n"), "drives.yaml:1: a hardware profile must be a mapping" + anew);
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
  save_profile(path(), measured(), std::array{OpKind::read}, "a test");
  const TrainConfig config = load("  nvme_paths: [a, b]\n  hardware_profile: drives.yaml\n");
  ASSERT_TRUE(config.offload.hardware_profile.has_value());
  EXPECT_DOUBLE_EQ((*config.offload.hardware_profile)[OpKind::read].work_per_second, 3.25e9);
  EXPECT_EQ(config.offload.io.block_size, 4 * kMiB);
  EXPECT_EQ(config.offload.io.queue_depth, 32u);  // of both drives together
  EXPECT_EQ(config.offload.io.write_depth, 16u);  // of each
}

TEST_F(ProfileConfigTest, WhatTheFileSaysWinsOverTheProfile) {
  save_profile(path(), measured(), std::array{OpKind::read}, "a test");
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
