// Some ranks of the run as one collective's: what every backend needs to know of them.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace overspill {

struct CollectiveGroup {
  std::string name;                 ///< unique in the run: its keys begin with it, messages name it
  uint32_t rank = 0, size = 1;      ///< of this rank in the group, and of the group
  std::vector<uint32_t> members{};  ///< their ranks in the run, for messages; empty: the same ones
  /// For the ranks to connect.
  std::chrono::milliseconds timeout{60000};
  /// A rank that makes no progress in a call for so long is lost; unset: the same.
  std::optional<std::chrono::milliseconds> patience{};
  /// The run's key-value store. `get` waits until the key is set, with a timeout of its own.
  std::function<void(const std::string& key, const std::string& value)> set{};
  std::function<std::string(const std::string& key)> get{};

  /// The number by which messages name a rank of the group.
  uint32_t member(uint32_t of_group) const {
    return members.empty() ? of_group : members.at(of_group);
  }
};

/// `total` elements over ranks in order, the first ones with one element more than the last ones.
struct Partition {
  uint64_t total = 0;
  uint32_t ranks = 1;
  uint64_t begin(uint32_t rank) const {
    const uint64_t remainder = total % ranks;
    return rank * (total / ranks) + (rank < remainder ? rank : remainder);
  }
  uint64_t length(uint32_t rank) const { return begin(rank + 1) - begin(rank); }
};

/// Of a part cut into pieces of `piece` elements: how many piece number `index` has, none at last.
inline uint64_t piece_length(uint64_t part, uint64_t piece, uint64_t index) {
  const uint64_t begin = index * piece;
  return begin >= part ? 0 : part - begin < piece ? part - begin : piece;
}

}  // namespace overspill
