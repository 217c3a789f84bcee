// Faults below a channel: injected ones at every request, and real ones from small and broken
// loop devices. Each must end in one clean Error, with nothing in flight and the channel usable.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
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
using Buffer = std::unique_ptr<std::byte, Freed>;

Buffer make_buffer(uint64_t bytes, uint64_t key) {
  Buffer made(static_cast<std::byte*>(std::aligned_alloc(kIoAlignment, bytes)));
  for (uint64_t i = 0; i < bytes; i += 8) {
    const uint64_t bits = random_bits(key, i);
    std::memcpy(made.get() + i, &bits, 8);
  }
  return made;
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

class NvmeFault : public test::DiskTest {
 protected:
  static constexpr uint64_t kBytes = 64 * kKiB;  // 16 requests of 4 KiB

  static IoOptions options(const FaultPlan& plan, uint32_t depth, uint64_t block = 4096) {
    IoOptions made;
    made.block_size = block;
    made.queue_depth = depth;
    made.wrap = [plan](std::unique_ptr<AsyncIo> io) { return make_faulty_io(std::move(io), plan); };
    return made;
  }

  static std::string failure(Channel& channel, bool write, std::byte* memory, uint64_t bytes) {
    try {
      const Channel::Segment segment{.offset = 0, .memory = memory, .bytes = bytes};
      if (write)
        channel.write({&segment, 1});
      else
        channel.read({&segment, 1});
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::io);
      return error.what();
    }
    return "";
  }
};

TEST_F(NvmeFault, EveryRequestMayFailAndTheNextTransferWorks) {
  const Volume volume(
      {.directories = {root_ / "a", root_ / "b"}, .capacity_bytes = kBytes, .stripe_bytes = 8192});
  const Buffer out = make_buffer(kBytes, 1), in = make_buffer(kBytes, 2);
  for (const uint32_t depth : {1u, 4u, 16u}) {
    for (uint64_t k = 0; k < kBytes / 4096; ++k) {
      for (const bool write : {true, false}) {
        Channel channel(volume, options({.fail_request = k, .error = ENODEV, .times = 1}, depth));
        const std::string text = failure(channel, write, out.get(), kBytes);
        EXPECT_TRUE(text.starts_with(write ? "write 4096 bytes at offset 0x" : "read 4096 bytes"))
            << "request " << k << ": " << text;
        EXPECT_TRUE(contains(text, ": No such device (")) << text;
        EXPECT_EQ(channel.stats().retries, 0u);
        // What the failed transfer left in flight would fail the counts or the bytes here.
        channel.write({{{.offset = 0, .memory = out.get(), .bytes = kBytes}}});
        std::memset(in.get(), 0, kBytes);
        channel.read({{{.offset = 0, .memory = in.get(), .bytes = kBytes}}});
        ASSERT_EQ(std::memcmp(in.get(), out.get(), kBytes), 0) << "request " << k;
      }
    }
  }
}

TEST_F(NvmeFault, OfTwoTransfersUnderWayTheOneThatFailedSaysSo) {
  const Volume volume({.directories = {root_}, .capacity_bytes = kBytes, .stripe_bytes = 8192});
  const Buffer out = make_buffer(kBytes, 1), in = make_buffer(kBytes, 2);
  constexpr uint64_t kHalf = kBytes / 2, kRequests = kHalf / 4096;
  const std::array<Channel::Segment, 1> first = {{{0, out.get(), kHalf}}},
                                        second = {{{kHalf, out.get() + kHalf, kHalf}}};
  for (const uint32_t depth : {1u, 3u, 16u}) {
    for (uint64_t k = 0; k < 2 * kRequests; ++k) {
      for (const bool write : {true, false}) {
        Channel channel(volume, options({.fail_request = k, .error = ENODEV, .times = 1}, depth));
        write ? channel.start_write(first) : channel.start_read(first);
        write ? channel.start_write(second) : channel.start_read(second);
        if (k >= kRequests) channel.finish();
        EXPECT_EQ(channel.started(), k >= kRequests ? 1u : 2u);
        try {
          channel.finish();
          ADD_FAILURE() << "no Error for request " << k;
        } catch (const Error& error) {
          EXPECT_TRUE(contains(error.what(), fmt::format("at offset {:#x}", (k + 1) * 4096)))
              << error.what();
        }
        EXPECT_EQ(channel.started(), 0u);
        EXPECT_EQ(volume.reads_in_flight(0), 0u);
        channel.write({{{.offset = 0, .memory = out.get(), .bytes = kBytes}}});
        std::memset(in.get(), 0, kBytes);
        channel.read({{{.offset = 0, .memory = in.get(), .bytes = kBytes}}});
        ASSERT_EQ(std::memcmp(in.get(), out.get(), kBytes), 0) << "request " << k;
      }
    }
  }
}

TEST_F(NvmeFault, AStuckRequestEndsAllThatIsUnderWay) {
  const Volume volume({.directories = {root_}, .capacity_bytes = kBytes, .stripe_bytes = 8192});
  const Buffer memory = make_buffer(kBytes, 1);
  constexpr uint64_t kHalf = kBytes / 2, kRequests = kHalf / 4096;
  for (const uint64_t stuck : {uint64_t{3}, kRequests + 3}) {
    IoOptions made = options({.faults = {{.kind = FaultKind::stuck, .request = stuck}}}, 16);
    made.timeout = std::chrono::milliseconds(200);
    Channel channel(volume, made);
    const std::array<Channel::Segment, 1> first = {{{0, memory.get(), kHalf}}},
                                          second = {{{kHalf, memory.get() + kHalf, kHalf}}};
    channel.start_write(first);
    channel.start_write(second);
    if (stuck > kRequests) channel.finish();
    try {
      channel.finish();
      ADD_FAILURE() << "no Error";
    } catch (const Error& error) {
      EXPECT_TRUE(contains(error.what(), fmt::format("at offset {:#x}", (stuck + 1) * 4096)))
          << error.what();
      EXPECT_TRUE(contains(error.what(), ": no completion after 0.")) << error.what();
    }
    EXPECT_EQ(channel.started(), 0u);
    channel.write({{{.offset = 0, .memory = memory.get(), .bytes = kBytes}}});
  }
}

TEST_F(NvmeFault, NamesBytesPlaceFileCauseAndNextStep) {
  const Volume volume({.directories = {root_}, .capacity_bytes = kMiB});
  Channel channel(volume, options({.fail_request = 3, .error = EIO}, 1));
  const Buffer memory = make_buffer(kBytes, 1);
  EXPECT_EQ(failure(channel, false, memory.get(), kBytes),
            "read 4096 bytes at offset 0x4000 of " + volume.files()[0].path().string() +
                ": Input/output error after 3 tries (12288 of 65536 bytes done); check the drive "
                "(dmesg), then resume from the last checkpoint");
  EXPECT_EQ(channel.stats().retries, 2u);
  EXPECT_EQ(channel.stats().bytes, 12288u);
}

TEST_F(NvmeFault, RetriesWhatMayPass) {
  const Volume volume({.directories = {root_}, .capacity_bytes = kMiB});
  const Buffer out = make_buffer(kBytes, 1), in = make_buffer(kBytes, 2);
  for (const int error : {EIO, EAGAIN, EINTR}) {
    for (const uint32_t depth : {1u, 4u}) {
      Channel channel(volume, options({.fail_request = 5, .error = error, .times = 2}, depth));
      channel.write({{{.offset = 0, .memory = out.get(), .bytes = kBytes}}});
      channel.read({{{.offset = 0, .memory = in.get(), .bytes = kBytes}}});
      EXPECT_EQ(std::memcmp(in.get(), out.get(), kBytes), 0);
      EXPECT_EQ(channel.stats().retries, 2u);
      EXPECT_EQ(channel.stats().requests, 2 * kBytes / 4096 + 2);
    }
  }
}

TEST_F(NvmeFault, DoesNotRetryAFullOrReadOnlyDrive) {
  const Volume volume({.directories = {root_}, .capacity_bytes = kMiB});
  const Buffer memory = make_buffer(kBytes, 1);
  const std::string path = volume.files()[0].path();
  Channel full(volume, options({.fail_request = 0, .error = ENOSPC}, 1));
  EXPECT_EQ(
      failure(full, true, memory.get(), kBytes),
      "write 4096 bytes at offset 0x1000 of " + path +
          ": No space left on device (0 of "
          "65536 bytes done); free space there or set offload.nvme_paths to a larger drive, then "
          "resume from the last checkpoint");
  EXPECT_EQ(full.stats().requests, 1u);
  Channel read_only(volume, options({.fail_request = 1, .error = EROFS}, 1));
  const std::string text = failure(read_only, true, memory.get(), kBytes);
  EXPECT_TRUE(contains(text,
                       "Read-only file system (4096 of 65536 bytes done); make the file "
                       "system writable again"))
      << text;
  EXPECT_EQ(read_only.stats().requests, 2u);
}

TEST_F(NvmeFault, ContinuesShortTransfers) {
  const Volume volume({.directories = {root_}, .capacity_bytes = kMiB});
  const Buffer out = make_buffer(kBytes, 1), in = make_buffer(kBytes, 2);
  for (uint64_t k = 0; k < 8; ++k) {  // 4 writes of 20 KiB or less, then 4 reads
    Channel channel(volume, options({.short_request = k}, 2, 20 * kKiB));
    channel.write({{{.offset = 0, .memory = out.get(), .bytes = kBytes}}});
    std::memset(in.get(), 0, kBytes);
    channel.read({{{.offset = 0, .memory = in.get(), .bytes = kBytes}}});
    EXPECT_EQ(std::memcmp(in.get(), out.get(), kBytes), 0) << "request " << k;
    EXPECT_EQ(channel.stats().bytes, 2 * kBytes);
    // The last block is one page: it cannot be cut.
    EXPECT_EQ(channel.stats().requests, k % 4 == 3 ? 8u : 9u);
  }
}

TEST_F(NvmeFault, SaysWhatToDoAboutALostDriveOrFile) {
  const Volume volume({.directories = {root_}, .capacity_bytes = kMiB});
  const Buffer memory = make_buffer(kBytes, 1);
  const std::vector<std::pair<int, std::string>> cases = {
      {ENODEV, ": No such device (0 of 65536 bytes done); the drive is gone: reconnect or replace"},
      {ENXIO, ": No such device or address (0 of 65536 bytes done); the drive is gone"},
      {ESTALE, ": Stale file handle (0 of 65536 bytes done); the file was revoked by its server"},
      {EROFS, ": Read-only file system (0 of 65536 bytes done); make the file system writable"},
      {EPERM, ": Operation not permitted (0 of 65536 bytes done); find what took the access"}};
  for (const auto& [error, expected] : cases) {
    Channel channel(volume, options({.fail_request = 0, .error = error}, 1));
    const std::string text = failure(channel, true, memory.get(), kBytes);
    EXPECT_TRUE(contains(text, expected)) << text;
    EXPECT_TRUE(contains(text, ", then resume from the last checkpoint")) << text;
    EXPECT_EQ(channel.stats().retries, 0u);
  }
}

TEST_F(NvmeFault, CancelsAndDrainsAStuckRequestAndNamesIt) {
  const Volume volume({.directories = {root_}, .capacity_bytes = kMiB});
  const Buffer memory = make_buffer(kBytes, 1);
  for (const bool write : {true, false}) {
    IoOptions made = options({.faults = {{.kind = FaultKind::stuck, .request = 3}}}, 4);
    made.timeout = std::chrono::milliseconds(200);
    Channel channel(volume, made);
    const std::string text = failure(channel, write, memory.get(), kBytes);
    EXPECT_TRUE(text.starts_with((write ? "write" : "read") +
                                 (" 4096 bytes at offset 0x4000 of " +
                                  volume.files()[0].path().string() + ": no completion after 0.")))
        << text;
    EXPECT_TRUE(contains(text,
                         " of 65536 bytes done); check the drive and its link (dmesg), or raise "
                         "offload.io.timeout if it is only slow, then resume from the last "
                         "checkpoint"))
        << text;
    channel.write({{{.offset = 0, .memory = memory.get(), .bytes = kBytes}}});
    channel.read({{{.offset = 0, .memory = memory.get(), .bytes = kBytes}}});
  }
}

TEST_F(NvmeFault, EndsTheProcessRatherThanReturnMemoryInFlight) {
  GTEST_FLAG_SET(death_test_style, "fast");  // the other style would leave a directory behind
  const Volume volume({.directories = {root_}, .capacity_bytes = kMiB});
  const Buffer memory = make_buffer(kBytes, 1);
  IoOptions made =
      options({.faults = {{.kind = FaultKind::stuck, .request = 0}}, .cancellable = false}, 1);
  made.backend = IoBackend::threads;
  made.timeout = std::chrono::milliseconds(50);
  const auto use = [&] {
    Channel channel(volume, made);
    failure(channel, false, memory.get(), kBytes);
  };
  EXPECT_EXIT(use(), testing::ExitedWithCode(1),
              "error: read 4096 bytes at offset 0x1000 of .*: no completion after 0.[0-9] s, and 1 "
              "requests could not be cancelled, so their memory must not be used again: this "
              "process ends now. Check the drive");
}

TEST_F(NvmeFault, WaitsAsLongAsItIsTold) {
  const Volume volume({.directories = {root_}, .capacity_bytes = kMiB});
  const Buffer memory = make_buffer(kBytes, 1);
  IoOptions made = options({.latency = std::chrono::milliseconds(40), .reorder = true}, 4);
  made.timeout = std::chrono::milliseconds(0);  // for ever
  Channel channel(volume, made);
  channel.write({{{.offset = 0, .memory = memory.get(), .bytes = kBytes}}});
  EXPECT_EQ(channel.stats().retries, 0u);
}

TEST_F(NvmeFault, ReportsASwapFileThatWasCutShort) {
  const Volume volume({.directories = {root_}, .capacity_bytes = kBytes, .stripe_bytes = kBytes});
  ASSERT_EQ(truncate(volume.files()[0].path().c_str(), 4096 + 8192), 0);
  Channel channel(volume, options({}, 1, kBytes));
  const Buffer memory = make_buffer(kBytes, 1);
  const std::string text = failure(channel, false, memory.get(), kBytes);
  EXPECT_EQ(text, "read 57344 bytes at offset 0x3000 of " + volume.files()[0].path().string() +
                      ": end of file (8192 of 65536 bytes done); find what cut the swap file short"
                      ", then resume from the last checkpoint");
}

TEST_F(NvmeFault, RefusesADriveThatIsTooSmallAndLeavesNothing) {
  if (!mount_small_disk(32)) GTEST_SKIP() << "loop devices and mount are not permitted here";
  const fs::path small = root_ / "small";
  fs::create_directory(root_ / "large");
  const auto free_before = fs::space(small).available;
  try {
    const Volume volume({.directories = {root_ / "large", small}, .capacity_bytes = 128 * kMiB});
    FAIL() << "no Error";
  } catch (const Error& error) {
    const std::string text = error.what();
    EXPECT_EQ(error.code(), ErrorCode::does_not_fit);
    EXPECT_TRUE(text.starts_with("swap file in " + small.string() +
                                 ": needs 64.00 MiB (67112960 "
                                 "bytes), "))
        << text;
    EXPECT_TRUE(contains(text,
                         "free; free space there, or set offload.nvme_paths to a larger "
                         "drive"))
        << text;
  }
  EXPECT_TRUE(fs::is_empty(root_ / "large"));
  EXPECT_EQ(fs::space(small).available, free_before);
  const Volume fits({.directories = {small}, .capacity_bytes = 16 * kMiB});
}

TEST_F(NvmeFault, ReportsARealInputOutputError) {
  if (!mount_small_disk(64)) GTEST_SKIP() << "loop devices and mount are not permitted here";
  for (const IoBackend backend : {IoBackend::automatic, IoBackend::threads}) {
    const uint64_t bytes = 32 * kMiB;
    const Volume volume({.directories = {root_ / "small"}, .capacity_bytes = bytes});
    if (!volume.direct()) GTEST_SKIP() << "no O_DIRECT on " << root_;
    IoOptions options;
    options.backend = backend;
    Channel channel(volume, options);
    const Buffer out = make_buffer(bytes, 1);
    channel.write({{{.offset = 0, .memory = out.get(), .bytes = bytes}}});
    ASSERT_EQ(truncate((root_ / "disk").c_str(), 8 * kMiB), 0);
    const std::string text = failure(channel, false, out.get(), bytes);
    EXPECT_TRUE(text.starts_with("read ")) << text;
    EXPECT_TRUE(contains(text, volume.files()[0].path().string() + ": Input/output error after 3 "
                                                                   "tries ("))
        << text;
    EXPECT_TRUE(contains(text,
                         " of 33554432 bytes done); check the drive (dmesg), then resume "
                         "from the last checkpoint"))
        << text;
    EXPECT_LT(channel.stats().bytes, 2 * bytes);
    ASSERT_EQ(truncate((root_ / "disk").c_str(), 64 * kMiB), 0);
    channel.write({{{.offset = 0, .memory = out.get(), .bytes = bytes}}});
    channel.read({{{.offset = 0, .memory = out.get(), .bytes = bytes}}});
  }
}

}  // namespace
}  // namespace overspill
