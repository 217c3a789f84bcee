// Channels over real swap files: round trips, how segments are cut, depth, and CHECKs.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <set>
#include <thread>

#include "engine/base/error.h"
#include "engine/base/random.h"
#include "engine/base/units.h"
#include "nvme/volume.h"

namespace overspill {
namespace {

namespace fs = std::filesystem;

struct Freed {
  void operator()(std::byte* memory) const { std::free(memory); }
};
using Buffer = std::unique_ptr<std::byte, Freed>;

Buffer make_buffer(uint64_t bytes) {
  return Buffer(static_cast<std::byte*>(std::aligned_alloc(kIoAlignment, bytes)));
}

void fill(std::byte* memory, uint64_t bytes, uint64_t key) {
  for (uint64_t i = 0; i < bytes; i += 8) {
    const uint64_t bits = random_bits(key, i);
    std::memcpy(memory + i, &bits, 8);
  }
}

/// What a channel asked of its backend.
struct Observed {
  std::vector<IoRequest> requests;
  size_t in_flight = 0, most_in_flight = 0;
};

class ObservingIo final : public AsyncIo {
 public:
  ObservingIo(std::unique_ptr<AsyncIo> inner, Observed& seen)
      : inner_(std::move(inner)), seen_(seen) {}
  const char* name() const override { return inner_->name(); }
  uint32_t depth() const override { return inner_->depth(); }
  void submit(std::span<const IoRequest> requests) override {
    seen_.requests.insert(seen_.requests.end(), requests.begin(), requests.end());
    seen_.in_flight += requests.size();
    seen_.most_in_flight = std::max(seen_.most_in_flight, seen_.in_flight);
    inner_->submit(requests);
  }
  size_t reap(std::span<IoResult> results, std::chrono::milliseconds timeout) override {
    const size_t count = inner_->reap(results, timeout);
    seen_.in_flight -= count;
    return count;
  }
  void cancel() override { inner_->cancel(); }

 private:
  std::unique_ptr<AsyncIo> inner_;
  Observed& seen_;
};

class ChannelTest : public testing::TestWithParam<IoBackend> {
 protected:
  void SetUp() override {
    GTEST_FLAG_SET(death_test_style, "fast");  // the other style would leave a directory behind
    if (GetParam() == IoBackend::io_uring && describe_io_backend() != "io_uring") {
      GTEST_SKIP() << "no io_uring here: " << describe_io_backend();
    }
    std::string name = fs::temp_directory_path() / "overspill-channel-XXXXXX";
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    root_ = name;
  }
  void TearDown() override { fs::remove_all(root_); }

  Volume make_volume(size_t directories, uint64_t capacity, uint64_t stripe) const {
    VolumeOptions options{.directories = {}, .capacity_bytes = capacity, .stripe_bytes = stripe};
    for (size_t i = 0; i < directories; ++i) {
      options.directories.push_back(root_ / std::to_string(i));
    }
    return Volume(options);
  }

  IoOptions io_options(uint64_t block = kMiB, uint32_t depth = 16) {
    IoOptions options;
    options.backend = GetParam();
    options.memory_files = memory_files_;
    options.block_size = block;
    options.queue_depth = depth;
    options.wrap = [this](std::unique_ptr<AsyncIo> io) {
      return std::make_unique<ObservingIo>(std::move(io), seen_);
    };
    return options;
  }

  fs::path root_;
  Observed seen_;
  std::shared_ptr<MemoryFiles> memory_files_ = make_memory_files();
};

TEST_P(ChannelTest, ReturnsWhatWasWrittenOverOneAndThreeFiles) {
  constexpr uint64_t kBytes = 6 * kMiB;
  for (const size_t directories : {1u, 3u}) {
    const Volume volume = make_volume(directories, kBytes, 64 * kKiB);
    Channel channel(volume, io_options(256 * kKiB));
    const Buffer out = make_buffer(kBytes), in = make_buffer(kBytes);
    fill(out.get(), kBytes, directories);
    // Written whole, read in odd pieces: an offset mapped twice would show.
    channel.write({{{.offset = 0, .memory = out.get(), .bytes = kBytes}}});
    std::vector<Channel::Segment> pieces;
    for (uint64_t at = 0, i = 0; at < kBytes; ++i) {
      const uint64_t bytes = std::min((1 + random_below(7, i, 40)) * 4096, kBytes - at);
      pieces.push_back({.offset = at, .memory = in.get() + at, .bytes = bytes});
      at += bytes;
    }
    std::reverse(pieces.begin(), pieces.end());
    channel.read(pieces);
    EXPECT_EQ(std::memcmp(in.get(), out.get(), kBytes), 0) << directories << " directories";
    EXPECT_EQ(channel.stats().bytes, 2 * kBytes);
    EXPECT_EQ(channel.stats().requests, seen_.requests.size());
    EXPECT_EQ(channel.stats().retries, 0u);
    seen_ = {};
  }
}

TEST_P(ChannelTest, KeepsTheHeaderPage) {
  const Volume volume = make_volume(2, kMiB, 64 * kKiB);
  std::vector<std::byte> before(4096), after(4096);
  read_exact(open_file(volume.files()[0].path(), O_RDONLY), 0, before);
  Channel channel(volume, io_options());
  const Buffer out = make_buffer(kMiB);
  fill(out.get(), kMiB, 1);
  channel.write({{{.offset = 0, .memory = out.get(), .bytes = kMiB}}});
  read_exact(open_file(volume.files()[0].path(), O_RDONLY), 0, after);
  EXPECT_EQ(std::memcmp(before.data(), "OVSPSWAP", 8), 0);
  EXPECT_EQ(before, after);
}

TEST_P(ChannelTest, CutsAtBlocksAndStripes) {
  const Volume volume = make_volume(2, kMiB, 64 * kKiB);
  Channel channel(volume, io_options(48 * kKiB));
  const Buffer memory = make_buffer(128 * kKiB);
  std::memset(memory.get(), 0, 128 * kKiB);
  channel.write({{{.offset = 32 * kKiB, .memory = memory.get(), .bytes = 128 * kKiB}}});
  std::vector<uint32_t> files, kibibytes;
  for (const IoRequest& request : seen_.requests) {
    files.push_back(request.file);
    kibibytes.push_back(request.bytes / 1024);
  }
  EXPECT_EQ(files, (std::vector<uint32_t>{0, 1, 1, 0}));
  EXPECT_EQ(kibibytes, (std::vector<uint32_t>{32, 48, 16, 32}));
}

TEST_P(ChannelTest, KeepsTheQueueFullAndNeverFuller) {
  const Volume volume = make_volume(1, kMiB, kMiB);
  Channel channel(volume, io_options(4096, 5));
  const Buffer memory = make_buffer(kMiB);
  std::memset(memory.get(), 0, kMiB);
  channel.write({{{.offset = 0, .memory = memory.get(), .bytes = kMiB}}});
  EXPECT_EQ(seen_.most_in_flight, 5u);
  EXPECT_EQ(seen_.in_flight, 0u);
  EXPECT_EQ(seen_.requests.size(), 256u);
}

TEST_P(ChannelTest, KeepsTheQueueFullOverTheEndOfATransfer) {
  constexpr uint64_t kPage = 4 * 4096;
  const Volume volume = make_volume(1, kMiB, kMiB);
  Channel channel(volume, io_options(4096, 6));
  const Buffer out = make_buffer(kMiB), in = make_buffer(kMiB);
  fill(out.get(), kMiB, 3);
  const auto move_all = [&](bool write, std::byte* memory) {
    std::array<Channel::Segment, kMiB / kPage> pages;
    for (size_t i = 0; i < pages.size(); ++i) {
      pages[i] = {.offset = i * kPage, .memory = memory + i * kPage, .bytes = kPage};
      const std::span<const Channel::Segment> page(&pages[i], 1);
      write ? channel.start_write(page) : channel.start_read(page);
      if (i == 0) continue;
      EXPECT_EQ(channel.started(), 2u);
      channel.finish();
      EXPECT_EQ(std::memcmp(memory, out.get(), i * kPage), 0) << "page " << i - 1;
    }
    channel.finish();
    EXPECT_EQ(channel.started(), 0u);
  };
  move_all(true, out.get());
  move_all(false, in.get());
  EXPECT_EQ(std::memcmp(in.get(), out.get(), kMiB), 0);
  EXPECT_EQ(seen_.most_in_flight, 6u);  // of two pages: one has four requests
  EXPECT_EQ(seen_.in_flight, 0u);
}

TEST_P(ChannelTest, AnUnfinishedTransferIsWaitedForAndCountedOut) {
  const Volume volume = make_volume(1, kMiB, kMiB);
  const Buffer memory = make_buffer(kMiB);
  const std::array<Channel::Segment, 1> all = {{{0, memory.get(), kMiB}}};
  {
    Channel channel(volume, io_options(4096, 16));
    channel.start_read(all);
    EXPECT_EQ(volume.reads_in_flight(0), 16u);
  }
  EXPECT_EQ(volume.reads_in_flight(0), 0u);
}

TEST_P(ChannelTest, ChecksHowManyTransfersAreUnderWay) {
  const Volume volume = make_volume(1, kMiB, kMiB);
  Channel channel(volume, io_options());
  EXPECT_DEATH(channel.finish(), "CHECK.*started_");
  channel.start_read({});
  EXPECT_DEATH(channel.read({}), "CHECK.*started_");
  channel.start_read({});
  EXPECT_DEATH(channel.start_read({}), "CHECK.*kMostStarted");
}

TEST_P(ChannelTest, AcceptsNothingToDo) {
  const Volume volume = make_volume(1, kMiB, kMiB);
  Channel channel(volume, io_options());
  channel.read({});
  channel.write({{{.offset = kMiB, .memory = nullptr, .bytes = 0}}});
  EXPECT_TRUE(seen_.requests.empty());
}

TEST_P(ChannelTest, TwoLanesMoveDifferentPagesAtOnce) {
  constexpr uint64_t kHalf = 2 * kMiB;
  const Volume volume = make_volume(2, 2 * kHalf, 64 * kKiB);
  const Buffer first = make_buffer(2 * kHalf), second = make_buffer(2 * kHalf);
  fill(first.get(), 2 * kHalf, 9);
  IoOptions options = io_options();
  options.wrap = nullptr;  // the observer is for one lane
  Channel reader(volume, options), writer(volume, options);
  writer.write({{{.offset = 0, .memory = first.get(), .bytes = kHalf}}});
  std::thread lane(
      [&] { writer.write({{{.offset = kHalf, .memory = first.get() + kHalf, .bytes = kHalf}}}); });
  reader.read({{{.offset = 0, .memory = second.get(), .bytes = kHalf}}});
  lane.join();
  reader.read({{{.offset = kHalf, .memory = second.get() + kHalf, .bytes = kHalf}}});
  EXPECT_EQ(std::memcmp(first.get(), second.get(), 2 * kHalf), 0);
}

TEST_P(ChannelTest, ChecksAlignmentAndBounds) {
  const Volume volume = make_volume(1, kMiB, kMiB);
  Channel channel(volume, io_options());
  const Buffer memory = make_buffer(2 * kMiB);
  std::byte* const start = memory.get();
  const auto read = [&](uint64_t offset, std::byte* to, uint64_t bytes) {
    channel.read({{{.offset = offset, .memory = to, .bytes = bytes}}});
  };
  EXPECT_DEATH(read(512, start, 4096), "CHECK.*kIoAlignment");
  EXPECT_DEATH(read(0, start + 64, 4096), "CHECK.*kIoAlignment");
  EXPECT_DEATH(read(0, start, 100), "CHECK.*kIoAlignment");
  EXPECT_DEATH(read(kMiB, start, 4096), "CHECK.*capacity");
  EXPECT_DEATH(read(4096, start, kMiB), "CHECK.*capacity");
}

TEST_P(ChannelTest, WritesHoldBackWhileTheDriveReads) {
  const Volume volume = make_volume(2, kMiB, 64 * kKiB);
  IoOptions options = io_options(16 * kKiB, 12);
  options.write_depth = 1;
  Channel channel(volume, options);
  const Buffer memory = make_buffer(kMiB);
  std::memset(memory.get(), 0, kMiB);
  const std::array<Channel::Segment, 1> all = {{{0, memory.get(), kMiB}}};
  volume.reads_in_flight(0) = 3;
  volume.reads_in_flight(1) = 1;
  channel.write(all);
  EXPECT_LE(seen_.most_in_flight, 2u);  // one on each drive
  volume.reads_in_flight(0) = volume.reads_in_flight(1) = 0;
  channel.read(all);
  EXPECT_EQ(volume.reads_in_flight(0) + volume.reads_in_flight(1), 0u);
  EXPECT_EQ(seen_.most_in_flight, 12u);
}

TEST_P(ChannelTest, GivesAFasterDriveMoreStripes) {
  VolumeOptions options{.directories = {root_ / "a", root_ / "b", root_ / "c"},
                        .capacity_bytes = 100 * 64 * kKiB,
                        .stripe_bytes = 64 * kKiB,
                        .shares = {3, 1, 2}};
  const Volume volume(options);
  EXPECT_EQ(volume.capacity_bytes(), 102 * 64 * kKiB);
  std::vector<uint64_t> stripes(3);
  std::set<std::pair<uint32_t, uint64_t>> places;
  for (uint64_t at = 0; at < volume.capacity_bytes(); at += 64 * kKiB) {
    const Volume::Place place = volume.place(at);
    ++stripes[place.file];
    EXPECT_TRUE(places.insert({place.file, place.offset}).second) << "two stripes in one place";
    EXPECT_LE(place.offset + 64 * kKiB, file_size(volume.files()[place.file]));
  }
  EXPECT_EQ(stripes, (std::vector<uint64_t>{51, 17, 34}));
  uint64_t file_bytes = 0;
  for (const Fd& file : volume.files()) file_bytes += file_size(file);
  EXPECT_EQ(file_bytes, volume_file_bytes(options.capacity_bytes, 3, 64 * kKiB, options.shares));
  Channel channel(volume, io_options(48 * kKiB));
  const Buffer out = make_buffer(6 * kMiB), in = make_buffer(6 * kMiB);
  fill(out.get(), 6 * kMiB, 1);
  channel.write({{{.offset = 0, .memory = out.get(), .bytes = 6 * kMiB}}});
  channel.read({{{.offset = 0, .memory = in.get(), .bytes = 6 * kMiB}}});
  EXPECT_EQ(std::memcmp(in.get(), out.get(), 6 * kMiB), 0);
}

INSTANTIATE_TEST_SUITE_P(Backends, ChannelTest,
                         testing::Values(IoBackend::io_uring, IoBackend::libaio, IoBackend::threads,
                                         IoBackend::memory),
                         [](const auto& instance) {
                           return std::string(io_backend_name(instance.param));
                         });

}  // namespace
}  // namespace overspill
