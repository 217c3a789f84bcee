// CRC32C of everything that was written to a volume, so that what is read is what was written: a
// lost, torn, misplaced or rotten block is named instead of used. One table is shared by all
// channels of a volume. Thread-safe for different regions; the caller orders a region's write
// before its read. Sums live in memory: swap files never outlive their process.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "nvme/volume.h"

namespace overspill {

/// CRC32C (Castagnoli) of bytes, by the processor's instruction where it has one.
uint32_t crc32c(std::span<const std::byte> bytes);
/// CRC-32 of zlib and gzip, of bytes behind those whose sum is `before`.
uint32_t crc32(std::span<const std::byte> bytes, uint32_t before = 0);

class Integrity {
 public:
  /// What is always written as a whole: a page, or a page's prefix that is also read alone.
  struct Region {
    uint64_t offset;  ///< in the volume
    uint64_t bytes;   ///< multiple of kIoAlignment
  };
  /// What messages call a region, such as "weights of layer 3, chunk 0".
  using Name = std::function<std::string(size_t region)>;

  /// Regions are sorted and disjoint. Channels cut requests at `block_bytes`, and the sums are
  /// kept for the pieces of at most kPieceBytes of each request: 8 bytes of memory per piece.
  Integrity(const Volume& volume, uint64_t block_bytes, std::vector<Region> regions, Name name);

  static constexpr uint64_t kPieceBytes = 64 << 10;

  /// A place in a region, and the entry of the piece that begins there.
  struct Place {
    uint32_t region = 0;
    uint64_t within = 0;  ///< bytes from the region's start
    uint64_t entry = 0;
  };
  uint64_t block_bytes() const { return block_bytes_; }
  /// The region that begins at a volume offset. CHECKs that there is one.
  Place find(uint64_t offset) const;
  /// Bytes to the end of the place's region.
  uint64_t left(const Place& place) const { return regions_[place.region].bytes - place.within; }
  /// The place after a request of `bytes`; the next region's start when this one ends.
  Place after(const Place& place, uint64_t bytes) const;

  bool written(const Place& place) const {
    return generations_[place.region].load(std::memory_order_relaxed) > 0;
  }
  /// Sums a request's bytes before they are written.
  void record(const Place& place, std::span<const std::byte> bytes);
  /// True when a request's bytes are those that were last written there.
  bool matches(const Place& place, std::span<const std::byte> bytes) const;

  /// For bytes that do not match: which page and bytes, expected and found sum, and what happened
  /// as far as the sums can tell.
  std::string describe(const Place& place, std::span<const std::byte> bytes) const;
  std::string name(const Place& place) const { return name_(place.region); }

 private:
  struct Entry {
    std::atomic<uint32_t> now{0};     ///< sum of the last write
    std::atomic<uint32_t> before{0};  ///< and of the one before it
  };
  struct Findings;

  Findings examine(const Place& place, std::span<const std::byte> bytes) const;
  std::string find_owner(const Place& place, const Findings& findings) const;

  uint64_t block_bytes_;
  std::vector<Region> regions_;
  Name name_;
  std::vector<uint64_t> first_entry_;               ///< per region, and one past the last
  std::vector<std::atomic<uint32_t>> generations_;  ///< writes of each region
  std::vector<Entry> entries_;
};

/// Bytes of the request that a channel cuts at `offset`: it ends at a block, a stripe, or `most`.
uint64_t request_bytes(const Volume& volume, uint64_t block_bytes, uint64_t offset, uint64_t most);

}  // namespace overspill
