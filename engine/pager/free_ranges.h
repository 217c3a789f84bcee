// Which parts of a piece of memory, or of a file, are free: first fit, in whole pages of 4096
// bytes. One thread at a time.
#pragma once

#include <cstdint>
#include <map>
#include <optional>

namespace overspill {

class FreeRanges {
 public:
  explicit FreeRanges(uint64_t bytes) {
    if (bytes > 0) free_[0] = bytes;
  }
  /// The offset of `bytes` (a multiple of 4096) that are taken from now on.
  std::optional<uint64_t> take(uint64_t bytes) {
    for (auto range = free_.begin(); range != free_.end(); ++range) {
      if (range->second < bytes) continue;
      const uint64_t offset = range->first, rest = range->second - bytes;
      free_.erase(range);
      if (rest > 0) free_[offset + bytes] = rest;
      return offset;
    }
    return std::nullopt;
  }
  void give_back(uint64_t offset, uint64_t bytes) {
    auto next = free_.lower_bound(offset);
    if (next != free_.end() && offset + bytes == next->first) {
      bytes += next->second;
      next = free_.erase(next);
    }
    if (next != free_.begin()) {
      const auto before = std::prev(next);
      if (before->first + before->second == offset) {
        before->second += bytes;
        return;
      }
    }
    free_[offset] = bytes;
  }

 private:
  std::map<uint64_t, uint64_t> free_;  ///< bytes by offset; no two touch
};

}  // namespace overspill
