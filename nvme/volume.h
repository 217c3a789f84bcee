// A striped address space over one swap file per directory, and channels that move pages through
// it. Swap files hold scratch state only: a dead run's files are recognised by their header and
// lock, reclaimed, and never read. Volume is immutable after creation; a Channel has one thread.
#pragma once

#include <atomic>
#include <chrono>
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
  /// Created when missing. With allow_raw_devices, also block devices that nothing uses.
  std::vector<std::filesystem::path> directories;
  uint64_t capacity_bytes = 0;      ///< size of the address space
  uint64_t stripe_bytes = 1 << 20;  ///< multiple of kIoAlignment
  /// Stripes of each drive in turn, such as {2, 1} for a drive twice as fast; empty: one each.
  std::vector<uint32_t> shares = {};
  bool allow_raw_devices = false;
};

/// What all files of a volume take together: whole rounds of stripes, and a header each.
uint64_t volume_file_bytes(uint64_t capacity_bytes, size_t files, uint64_t stripe_bytes,
                           std::span<const uint32_t> shares = {});

class Volume {
 public:
  /// Reclaims dead runs' files, creates and locks this run's, and preallocates them whole.
  /// Throws Error(does_not_fit) naming directory, bytes needed and free when a disk is too small.
  explicit Volume(const VolumeOptions& options);
  /// Removes the swap files. Devices keep what was written to them.
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

  /// Reads that channels have in flight on a file. Writers make room for them.
  std::atomic<uint32_t>& reads_in_flight(uint32_t file) const { return reads_in_flight_[file]; }

 private:
  /// One stripe of a round: its file, and how many of the file's precede it in the round.
  struct Turn {
    uint32_t file;
    uint32_t nth;
  };

  void plan_round(std::span<const uint32_t> shares, size_t files);
  void add_swap_file(const std::filesystem::path& directory, uint64_t run_id, uint64_t bytes);

  std::vector<Fd> files_;
  uint64_t capacity_bytes_ = 0;
  uint64_t stripe_bytes_ = 0;
  std::vector<Turn> round_;
  std::vector<uint32_t> shares_;  ///< stripes of each file in a round
  bool direct_ = true;
  mutable std::vector<std::atomic<uint32_t>> reads_in_flight_;
};

/// Bytes and requests that a channel has moved.
struct ChannelStats {
  uint64_t bytes = 0;
  uint64_t requests = 0;
  uint64_t retries = 0;
  uint64_t rereads = 0;  ///< reads whose bytes did not match their checksum at first
};

class Integrity;

/// One lane's way to a volume: cuts segments into requests, keeps queue_depth of them in flight
/// (over the end of a transfer, where the next one has started), continues short transfers, retries
/// EAGAIN, EINTR and EIO (3 tries with backoff), and gives up on requests that do not complete.
/// With an Integrity, it sums what it writes and checks what it reads, request by request while
/// others are in flight; a mismatch is read once more.
class Channel {
 public:
  struct Segment {
    uint64_t offset;    ///< in the volume, multiple of kIoAlignment
    std::byte* memory;  ///< aligned to kIoAlignment
    uint64_t bytes;     ///< multiple of kIoAlignment
  };

  /// With an integrity table (shared by the volume's channels, of the same block size), segments
  /// consist of whole regions of it.
  Channel(const Volume& volume, const IoOptions& options, Integrity* integrity = nullptr);
  /// Waits for what is in flight, without a limit.
  ~Channel();
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  /// Moves all segments and returns when they are done; fails as finish() does. With nothing else
  /// under way.
  void read(std::span<const Segment> segments) { transfer(segments, false); }
  void write(std::span<const Segment> segments) { transfer(segments, true); }

  /// Transfers that may be under way: one to wait for, and one that keeps the queue full meanwhile.
  static constexpr uint32_t kMostStarted = 2;
  /// Starts a transfer and returns. Its segments stay in place until finish(), and share neither
  /// pages nor memory with the other one's. Only finish() looks for stuck requests.
  void start_read(std::span<const Segment> segments) { start(segments, false); }
  void start_write(std::span<const Segment> segments) { start(segments, true); }
  uint32_t started() const { return started_; }
  /// Returns when the oldest started transfer is done. When it failed, drains all that is in
  /// flight, gives up the other one, and throws Error(io): bytes done, offset, file, cause and next
  /// step (the page only where its checksum failed). Where a stuck request cannot be cancelled, the
  /// process ends: returning would free memory that the kernel may still write.
  void finish();

  const ChannelStats& stats() const { return stats_; }
  const char* backend() const { return io_->name(); }

 private:
  using Clock = std::chrono::steady_clock;
  struct Slot;
  struct Failure;
  struct Transfer;

  void transfer(std::span<const Segment> segments, bool write);
  void start(std::span<const Segment> segments, bool write);
  Transfer& under_way(uint32_t index);
  void fill_queue();
  void add_requests(Transfer& transfer);
  bool has_room(uint32_t file, bool write) const;
  void cut_request(Transfer& transfer, const Volume::Place& place);
  uint32_t worth_waking_for(const Transfer& transfer);
  void submit_batch();
  void take_result(const IoResult& result);
  void take_moved_bytes(uint32_t bytes, Slot& slot);
  void check_finished();
  void check_content(Slot& slot);
  void free_slot(Slot& slot);
  void free_held_slots();
  void look_for_stuck();
  std::span<std::byte> whole(const Slot& slot) const;
  [[noreturn]] void fail_transfer(const Transfer& transfer) const;
  [[noreturn]] void end_process(const Transfer& transfer) const;

  const Volume& volume_;
  uint64_t block_bytes_;
  std::chrono::milliseconds timeout_;
  Integrity* integrity_;
  std::unique_ptr<AsyncIo> io_;
  ChannelStats stats_;
  uint32_t in_flight_ = 0;
  uint32_t write_depth_;
  std::vector<uint32_t> file_in_flight_;  ///< by file, from cutting to the end
  uint32_t depth_;
  // One slot per request in flight, and as many for those whose content is checked meanwhile. Sized
  // once: a transfer allocates nothing.
  std::vector<Slot> slots_;
  std::vector<uint32_t> free_slots_;
  std::vector<uint32_t> finished_;  ///< slots to be checked
  std::vector<IoRequest> batch_;
  std::vector<IoResult> results_;
  std::vector<Transfer> transfers_;  ///< a ring of kMostStarted
  uint32_t oldest_ = 0, started_ = 0;
  Clock::time_point drain_until_ = Clock::time_point::max();  ///< after a cancel
};

}  // namespace overspill
