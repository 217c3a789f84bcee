// Checksums: the sum itself, what a channel finds out about damaged files, and what it calls it.
#include "nvme/integrity.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <thread>

#include "engine/base/error.h"
#include "engine/base/log.h"
#include "engine/base/random.h"
#include "engine/base/units.h"

namespace overspill {
namespace {

namespace fs = std::filesystem;

TEST(Crc32c, MatchesPublishedValues) {
  const auto sum = [](const std::string& text) {
    return crc32c(std::as_bytes(std::span(text.data(), text.size())));
  };
  EXPECT_EQ(sum("123456789"), 0xe3069283u);  // RFC 3720, B.4
  EXPECT_EQ(sum(std::string(32, '\0')), 0x8a9136aau);
  EXPECT_EQ(sum(std::string(32, '\xff')), 0x62a8ab43u);
  EXPECT_EQ(sum(""), 0u);
}

struct Freed {
  void operator()(std::byte* memory) const { std::free(memory); }
};
using Buffer = std::unique_ptr<std::byte, Freed>;

class IntegrityTest : public testing::Test {
 protected:
  static constexpr uint64_t kPage = 512 * kKiB, kPages = 4;  // pages 0 to 3, one region each

  void SetUp() override {
    set_log_level(LogLevel::off);
    std::string name = fs::temp_directory_path() / "overspill-integrity-XXXXXX";
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    root_ = name;
    memory_.reset(static_cast<std::byte*>(std::aligned_alloc(kIoAlignment, kPage)));
  }
  void TearDown() override {
    fs::remove_all(root_);
    set_log_level(LogLevel::info);
  }

  void open(size_t directories = 1, uint64_t stripe = kMiB, const FaultPlan& plan = {}) {
    VolumeOptions volume{
        .directories = {}, .capacity_bytes = kPages * kPage, .stripe_bytes = stripe};
    for (size_t i = 0; i < directories; ++i) {
      volume.directories.push_back(root_ / std::to_string(i));
    }
    volume_ = std::make_unique<Volume>(volume);
    options_.block_size = 256 * kKiB;
    options_.queue_depth = 4;
    options_.wrap = [plan](std::unique_ptr<AsyncIo> io) {
      return make_faulty_io(std::move(io), plan);
    };
    std::vector<Integrity::Region> regions;
    for (uint64_t i = 0; i < kPages; ++i) regions.push_back({i * kPage, kPage});
    integrity_ =
        std::make_unique<Integrity>(*volume_, options_.block_size, regions,
                                    [](size_t region) { return "page " + std::to_string(region); });
    channel_ = std::make_unique<Channel>(*volume_, options_, integrity_.get());
  }

  void fill(uint64_t key) {
    for (uint64_t i = 0; i < kPage; i += 8) {
      const uint64_t bits = random_bits(key, i);
      std::memcpy(memory_.get() + i, &bits, 8);
    }
  }
  Channel::Segment segment(uint64_t page) const {
    return {.offset = page * kPage, .memory = memory_.get(), .bytes = kPage};
  }
  void write(uint64_t page, uint64_t key) {
    fill(key);
    channel_->write(std::array{segment(page)});
  }
  /// The message of the error that reading a page ends in.
  std::string failure(uint64_t page) {
    try {
      channel_->read(std::array{segment(page)});
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::io);
      return error.what();
    }
    return "";
  }
  /// Overwrites bytes of a page behind the channel's back (one file only).
  void damage(uint64_t page, uint64_t within, std::span<const std::byte> bytes) {
    const Volume::Place place = volume_->place(page * kPage + within);
    const Fd file = open_file(volume_->files()[0].path(), O_RDWR);
    write_exact(file, place.offset, bytes);
    sync_file(file);
  }
  std::vector<std::byte> content(uint64_t key) {
    fill(key);
    return {memory_.get(), memory_.get() + kPage};
  }
  static testing::AssertionResult has(const std::string& text, const std::string& part) {
    if (text.find(part) != std::string::npos) return testing::AssertionSuccess();
    return testing::AssertionFailure() << "\"" << text << "\" lacks \"" << part << "\"";
  }

  fs::path root_;
  IoOptions options_;
  Buffer memory_;
  std::unique_ptr<Volume> volume_;
  std::unique_ptr<Integrity> integrity_;
  std::unique_ptr<Channel> channel_;
};

TEST_F(IntegrityTest, AcceptsWhatWasWrittenOverStripesThatCutPages) {
  open(3, 96 * kKiB);
  for (uint64_t round = 1; round <= 2; ++round) {
    for (uint64_t page = 0; page < kPages; ++page) write(page, 10 * round + page);
    for (uint64_t page = 0; page < kPages; ++page) {
      std::memset(memory_.get(), 0, kPage);
      channel_->read(std::array{segment(page)});
      const std::vector<std::byte> read(memory_.get(), memory_.get() + kPage);
      EXPECT_EQ(read, content(10 * round + page));
    }
  }
  EXPECT_EQ(channel_->stats().rereads, 0u);
}

TEST_F(IntegrityTest, ChecksBothTransfersUnderWay) {
  open();
  for (uint64_t page = 0; page < 3; ++page) write(page, page + 1);
  damage(1, 8192, std::vector<std::byte>(4096));
  const Buffer other(static_cast<std::byte*>(std::aligned_alloc(kIoAlignment, kPage)));
  const std::array<Channel::Segment, 1> good = {segment(0)}, bad = {{{kPage, other.get(), kPage}}};
  channel_->start_read(good);
  channel_->start_read(bad);
  channel_->finish();
  const std::vector<std::byte> read(memory_.get(), memory_.get() + kPage);
  EXPECT_EQ(read, content(1));
  try {
    channel_->finish();
    ADD_FAILURE() << "no Error";
  } catch (const Error& error) {
    EXPECT_TRUE(has(error.what(), "page 1"));
  }
  EXPECT_EQ(failure(2), "");
}

TEST_F(IntegrityTest, NamesAReadBeforeAWrite) {
  open();
  write(0, 1);
  EXPECT_TRUE(has(failure(2), ": page 2 is read before it was written (0 of 524288 bytes done)"));
  EXPECT_EQ(failure(0), "");
}

TEST_F(IntegrityTest, NamesRottenBytesWithBothSums) {
  open();
  write(1, 1);
  const auto good = content(1);
  std::array<std::byte, 1> bad = {good[300000] ^ std::byte{4}};
  damage(1, 300000, bad);
  const std::string text = failure(1);
  EXPECT_TRUE(text.starts_with("read 262144 bytes at offset 0xc1000 of " +
                               volume_->files()[0].path().string() +
                               ": bytes 262144 to 327680 of page 1 fail their checksum (CRC32C "))
      << text;
  EXPECT_TRUE(
      has(text, fmt::format("{:08x} expected, ", crc32c(std::span(good).subspan(262144, 65536)))));
  EXPECT_TRUE(has(text,
                  "; write 1); rotten (or torn inside these bytes): it holds what nobody "
                  "wrote (262144 of 524288 bytes done); check the drive and its memory path "
                  "(dmesg, smartctl -a), then resume from the last checkpoint"));
  EXPECT_EQ(channel_->stats().rereads, 1u);
}

TEST_F(IntegrityTest, NamesAStaleAndATornBlock) {
  open();
  write(1, 1);
  const auto before = content(1);
  write(1, 2);
  const auto now = content(2);
  damage(1, 0, std::span(before).first(256 * kKiB));
  EXPECT_TRUE(has(failure(1), "bytes 0 to 262144 of page 1 fail their checksum"));
  EXPECT_TRUE(has(failure(1), "; write 2); stale: the last write never arrived"));
  damage(1, 0, std::span(now).first(100 * kKiB));  // the tear lies inside a piece
  EXPECT_TRUE(has(failure(1), "bytes 65536 to 262144 of page 1 fail their checksum"));
  EXPECT_TRUE(has(failure(1), "torn: the last write arrived in part"));
}

TEST_F(IntegrityTest, NamesTheOwnerOfMisplacedBytes) {
  open();
  for (uint64_t page = 0; page < kPages; ++page) write(page, page + 1);
  const auto third = content(4);
  write(3, 9);
  damage(1, 0, std::span(third).first(256 * kKiB));
  EXPECT_TRUE(has(failure(1),
                  "misplaced: it holds what was written for page 3 (before its last "
                  "write)"));
  damage(2, 256 * kKiB, content(1));
  EXPECT_TRUE(has(failure(2), "misplaced: it holds what was written for page 0 ("));
}

TEST_F(IntegrityTest, NamesZeros) {
  open();
  write(0, 1);
  damage(0, 0, std::vector<std::byte>(kPage));
  EXPECT_TRUE(has(failure(0), "empty: it holds zeros only"));
}

TEST_F(IntegrityTest, ReadsAFlippedBitOnceMore) {
  for (uint64_t request = 2; request < 4; ++request) {
    open(1, kMiB, {.faults = {{.kind = FaultKind::bit_flip, .request = request}}});
    write(0, 1);
    EXPECT_EQ(failure(0), "");
    EXPECT_EQ(std::vector<std::byte>(memory_.get(), memory_.get() + kPage), content(1));
    EXPECT_EQ(channel_->stats().rereads, 1u);
    EXPECT_EQ(channel_->stats().bytes, 2 * kPage);
    channel_.reset();
  }
}

TEST_F(IntegrityTest, ReadsManyFlippedBlocksOnceMoreWithinItsDepth) {
  open(1, kMiB, {.faults = {{.kind = FaultKind::bit_flip, .request = 8, .times = 8}}});
  options_.block_size = 64 * kKiB;
  integrity_ = std::make_unique<Integrity>(*volume_, options_.block_size,
                                           std::vector<Integrity::Region>{{0, kPage}},
                                           [](size_t) { return "the page"; });
  channel_ = std::make_unique<Channel>(*volume_, options_, integrity_.get());
  write(0, 1);
  EXPECT_EQ(failure(0), "");
  EXPECT_EQ(std::vector<std::byte>(memory_.get(), memory_.get() + kPage), content(1));
  EXPECT_GT(channel_->stats().rereads, 3u);
}

TEST_F(IntegrityTest, LanesOfDifferentPagesShareTheTable) {
  open(2, 64 * kKiB);
  write(0, 1);
  Channel writer(*volume_, options_, integrity_.get());
  const Buffer other(static_cast<std::byte*>(std::aligned_alloc(kIoAlignment, kPage)));
  std::memset(other.get(), 7, kPage);
  std::thread lane([&] {
    for (uint64_t i = 0; i < 20; ++i) {
      writer.write(std::array{Channel::Segment{(1 + i % 3) * kPage, other.get(), kPage}});
    }
  });
  for (int i = 0; i < 20; ++i) EXPECT_EQ(failure(0), "");
  lane.join();
  for (uint64_t page = 1; page < kPages; ++page) EXPECT_EQ(failure(page), "");
}

}  // namespace
}  // namespace overspill
