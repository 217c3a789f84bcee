// Block devices as drives, on loop devices: what is refused, and round trips with both kinds of
// sectors.
#include <gtest/gtest.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <optional>

#include "engine/base/error.h"
#include "engine/base/random.h"
#include "engine/base/units.h"
#include "nvme/volume.h"
#include "tests/fault/disk_fixture.h"

namespace overspill {
namespace {

namespace fs = std::filesystem;

struct Freed {
  void operator()(std::byte* memory) const { std::free(memory); }
};

class RawDevice : public test::DiskTest {
 protected:
  /// A new loop device of 16 MiB; empty when not permitted.
  std::string make_device(int sector_bytes = 512) {
    const std::string file = root_ / ("disk" + std::to_string(undo_.size()));
    if (!shell("truncate -s 16M " + file)) return "";
    const auto device =
        shell("losetup -f --show --sector-size " + std::to_string(sector_bytes) + " " + file);
    if (!device) return "";
    undo_.push_back("losetup -d " + *device);
    return *device;
  }

  static VolumeOptions options(const std::string& device, uint64_t bytes = 8 * kMiB) {
    return {.directories = {device}, .capacity_bytes = bytes, .allow_raw_devices = true};
  }
  static std::string refusal(const VolumeOptions& options, ErrorCode code) {
    try {
      const Volume volume(options);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), code) << error.what();
      return error.what();
    }
    return "the volume was created";
  }
  static testing::AssertionResult has(const std::string& text, const std::string& part) {
    if (text.find(part) != std::string::npos) return testing::AssertionSuccess();
    return testing::AssertionFailure() << "\"" << text << "\" lacks \"" << part << "\"";
  }
};

constexpr const char* kNoLoop = "loop devices are not permitted here";

TEST_F(RawDevice, NeedsTheUsersWord) {
  const std::string device = make_device();
  if (device.empty()) GTEST_SKIP() << kNoLoop;
  VolumeOptions silent = options(device);
  silent.allow_raw_devices = false;
  EXPECT_EQ(refusal(silent, ErrorCode::invalid_config),
            "offload.nvme_paths: " + device +
                " is a block device, and all that is on it would be overwritten; set "
                "`allow_raw_devices: true` under `offload:` if that is meant, or name a directory");
}

TEST_F(RawDevice, RoundTripsWithBothSectorSizesBesideADirectory) {
  constexpr uint64_t kBytes = 8 * kMiB;
  const std::unique_ptr<std::byte, Freed> out(
      static_cast<std::byte*>(std::aligned_alloc(kIoAlignment, kBytes))),
      in(static_cast<std::byte*>(std::aligned_alloc(kIoAlignment, kBytes)));
  for (uint64_t i = 0; i < kBytes; i += 8) {
    const uint64_t bits = random_bits(5, i);
    std::memcpy(out.get() + i, &bits, 8);
  }
  for (const int sector : {512, 4096}) {
    const std::string device = make_device(sector);
    if (device.empty()) GTEST_SKIP() << kNoLoop;
    for (const IoBackend backend : {IoBackend::automatic, IoBackend::libaio, IoBackend::threads}) {
      VolumeOptions both = options(device, kBytes);
      both.directories.push_back(root_ / "directory");
      both.stripe_bytes = 64 * kKiB;
      const Volume volume(both);
      IoOptions io;
      io.backend = backend;
      Channel channel(volume, io);
      channel.write({{{.offset = 0, .memory = out.get(), .bytes = kBytes}}});
      std::memset(in.get(), 0, kBytes);
      channel.read({{{.offset = 0, .memory = in.get(), .bytes = kBytes}}});
      EXPECT_EQ(std::memcmp(in.get(), out.get(), kBytes), 0) << sector;
    }
    EXPECT_TRUE(fs::exists(device));
  }
}

TEST_F(RawDevice, IsRefusedWhileSomethingUsesIt) {
  const std::string device = make_device();
  if (device.empty()) GTEST_SKIP() << kNoLoop;
  const Volume first(options(device));
  EXPECT_TRUE(has(refusal(options(device), ErrorCode::invalid_config),
                  device + " is mounted, or in use by a RAID, a volume group or another run; name "
                           "a free device in offload.nvme_paths"));
}

TEST_F(RawDevice, IsRefusedWhenItHoldsAFileSystemEvenUnmounted) {
  const std::string device = make_device();
  if (device.empty()) GTEST_SKIP() << kNoLoop;
  if (!shell("mkfs.ext4 -q " + device)) GTEST_SKIP() << "no mkfs.ext4 here";
  EXPECT_TRUE(has(refusal(options(device), ErrorCode::invalid_config),
                  device + " holds ext4, which would be overwritten; wipe it (wipefs -a)"));
  const std::string mounted = root_ / "mnt";
  fs::create_directory(mounted);
  if (shell("mount " + device + " " + mounted)) {
    undo_.push_back("umount " + mounted);
    EXPECT_TRUE(has(refusal(options(device), ErrorCode::invalid_config), " is mounted, or in use"));
  }
}

TEST_F(RawDevice, IsRefusedWhenItHoldsSwapSpaceOrIsTooSmall) {
  const std::string device = make_device();
  if (device.empty()) GTEST_SKIP() << kNoLoop;
  EXPECT_TRUE(has(refusal(options(device, 16 * kMiB), ErrorCode::does_not_fit),
                  device + ": needs 16.00 MiB (16781312 bytes), the device has 16.00 MiB (16777216 "
                           "bytes); set offload.nvme_paths to a larger drive"));
  if (!shell("mkswap " + device)) GTEST_SKIP() << "no mkswap here";
  EXPECT_TRUE(has(refusal(options(device), ErrorCode::invalid_config), " holds swap, which would"));
}

}  // namespace
}  // namespace overspill
