// Derives dependencies from what ops touch, as a processor's scoreboard does: an op waits for the
// last writer of what it reads, and for the last writer and all readers of what it writes.
// Dependencies already implied by lane order or by another dependency are left out.
#pragma once

#include <array>
#include <map>
#include <span>
#include <vector>

#include "engine/program/program.h"

namespace overspill {

class Hazards {
 public:
  Hazards(size_t slots, size_t pages) : slots_(slots), nvme_(pages) {}

  /// Registers the next op (ids count from 0) and returns its dependencies, newest first.
  /// `nvme_read` / `nvme_write` say that each access's pages are also touched at their NVMe home.
  std::vector<OpId> add(Lane lane, std::span<const Access> accesses, bool nvme_read,
                        bool nvme_write, OpId extra);

 private:
  struct Piece {
    uint64_t end;
    OpId writer;
    std::array<OpId, kLanes> readers;  ///< the newest per lane: lanes are FIFO
  };
  using Pieces = std::map<uint64_t, Piece>;  ///< by first byte, disjoint

  static void split(Pieces& pieces, uint64_t at);
  void touch(Pieces& pieces, uint64_t begin, uint64_t end, bool reads, bool writes, OpId op,
             Lane lane);
  bool implied(OpId dep, const std::array<uint32_t, kLanes>& clock) const;

  std::vector<Pieces> slots_;
  std::vector<Pieces> nvme_;
  std::vector<OpId> candidates_;
  std::vector<std::array<uint32_t, kLanes>> clocks_;
  std::vector<Lane> lanes_;
  std::vector<uint32_t> positions_;
  std::array<uint32_t, kLanes> lane_size_{};
  std::array<OpId, kLanes> lane_last_{};
};

}  // namespace overspill
