// Shares from rates, and a measurement of a drive that is slowed down.
#include "nvme/drive_probe.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>

#include "engine/base/error.h"
#include "engine/base/units.h"

namespace overspill {
namespace {

namespace fs = std::filesystem;
using Shares = std::vector<uint32_t>;

Shares shares(const std::vector<double>& rates) { return shares_of(rates); }

TEST(DriveShares, AreSmallNumbersInProportion) {
  EXPECT_EQ(shares({3e9}), (Shares{1}));
  EXPECT_EQ(shares({3e9, 3.3e9}), (Shares{1, 1}));
  EXPECT_EQ(shares({6e9, 3e9}), (Shares{2, 1}));
  EXPECT_EQ(shares({2e9, 3e9}), (Shares{2, 3}));
  EXPECT_EQ(shares({1e9, 7e9, 3.5e9}), (Shares{2, 14, 7}));
  EXPECT_EQ(shares({1e6, 9e9}), (Shares{1, 64}));
}

class DriveProbe : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = fs::temp_directory_path() / "overspill-probe-XXXXXX";
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    root_ = name;
  }
  void TearDown() override { fs::remove_all(root_); }
  fs::path root_;
};

TEST_F(DriveProbe, MeasuresAllDrivesAndLeavesNothing) {
  const VolumeOptions volume{.directories = {root_ / "a", root_ / "b"}, .capacity_bytes = kGiB};
  const std::vector<double> rates = measure_drives(volume, {}, 4 * kMiB);
  ASSERT_EQ(rates.size(), 2u);
  for (const double rate : rates) EXPECT_GT(rate, 1e5);
  EXPECT_TRUE(fs::is_empty(root_ / "a"));
  EXPECT_TRUE(fs::is_empty(root_ / "b"));
}

TEST_F(DriveProbe, ReportsADriveThatFails) {
  IoOptions io;
  io.wrap = [](std::unique_ptr<AsyncIo> inner) {
    return make_faulty_io(std::move(inner), {.fail_request = 2, .error = ENODEV});
  };
  EXPECT_THROW(measure_drives({.directories = {root_ / "a"}, .capacity_bytes = kGiB}, io, 4 * kMiB),
               Error);
}

}  // namespace
}  // namespace overspill
