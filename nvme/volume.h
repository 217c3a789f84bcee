// A striped address space over one swap file per directory, and channels that move pages through
// it. Swap files hold scratch state only: a dead run's files are recognised by their header and
// lock, reclaimed, and never read. Volume is immutable after creation; a Channel has one thread.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <vector>

#include "engine/base/fd.h"
#include "nvme/async_io.h"

namespace overspill {

/// Alignment of every page's offset and size, and of every buffer.
inline constexpr uint64_t kIoAlignment = 4096;

struct VolumeOptions {
  std::vector<std::filesystem::path> directories;  ///< created when missing
  uint64_t capacity_bytes = 0;                     ///< size of the address space
  uint64_t stripe_bytes = 1 << 20;                 ///< multiple of kIoAlignment
};

/// What all files of a volume take together: whole stripes, and a header each.
uint64_t volume_file_bytes(uint64_t capacity_bytes, size_t files, uint64_t stripe_bytes);

class Volume {
 public:
  /// Reclaims dead runs' files, creates and locks this run's, and preallocates them whole.
  /// Throws Error(does_not_fit) naming directory, bytes needed and free when a disk is too small.
  explicit Volume(const VolumeOptions& options);
  /// Removes the swap files.
  ~Volume();
  Volume(const Volume&) = delete;
  Volume& operator=(const Volume&) = delete;

  uint64_t capacity_bytes() const { return capacity_bytes_; }
  std::span<const Fd> files() const { return files_; }
  /// True when every file was opened with O_DIRECT.
  bool direct() const { return direct_; }

  /// Where `offset` lies: file, offset in it, and how many contiguous bytes follow there.
  struct Place {
    uint32_t file;
    uint64_t offset;
    uint64_t contiguous_bytes;
  };
  Place place(uint64_t offset) const;

 private:
  std::vector<Fd> files_;
  uint64_t capacity_bytes_ = 0;
  uint64_t stripe_bytes_ = 0;
  bool direct_ = true;
};

/// Bytes and requests that a channel has moved.
struct ChannelStats {
  uint64_t bytes = 0;
  uint64_t requests = 0;
  uint64_t retries = 0;
};

/// One lane's way to a volume: cuts segments into requests, keeps queue_depth of them in flight,
/// continues short transfers, and retries EAGAIN, EINTR and EIO (3 tries with backoff).
class Channel {
 public:
  struct Segment {
    uint64_t offset;    ///< in the volume, multiple of kIoAlignment
    std::byte* memory;  ///< aligned to kIoAlignment
    uint64_t bytes;     ///< multiple of kIoAlignment
  };

  Channel(const Volume& volume, const IoOptions& options);
  ~Channel();

  /// Moves all segments and returns when they are done. On failure, drains what is in flight, then
  /// throws Error(io): bytes done, offset, file, cause and next step (without naming the page).
  void read(std::span<const Segment> segments) { transfer(segments, false); }
  void write(std::span<const Segment> segments) { transfer(segments, true); }

  const ChannelStats& stats() const { return stats_; }
  const char* backend() const { return io_->name(); }

 private:
  struct Slot {
    IoRequest request;   // what is left of it
    uint32_t tries = 0;  // without progress
  };
  struct Transfer;

  void transfer(std::span<const Segment> segments, bool write);
  void cut_requests(Transfer& transfer);
  void finish(const IoResult& result, Transfer& transfer);
  [[noreturn]] void fail_transfer(const Transfer& transfer) const;

  const Volume& volume_;
  uint64_t block_bytes_;
  std::unique_ptr<AsyncIo> io_;
  ChannelStats stats_;
  // One slot per request in flight. Sized once: a transfer allocates nothing.
  std::vector<Slot> slots_;
  std::vector<uint32_t> free_slots_;
  std::vector<IoRequest> batch_;
  std::vector<IoResult> results_;
};

}  // namespace overspill
