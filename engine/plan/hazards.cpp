// The scoreboard: interval maps of last writers and readers per slot and per NVMe page.
#include "engine/plan/hazards.h"

#include <algorithm>

namespace overspill {

void Hazards::split(Pieces& pieces, uint64_t at) {
  auto next = pieces.upper_bound(at);
  if (next == pieces.begin()) return;
  auto piece = std::prev(next);
  if (piece->first == at || piece->second.end <= at) return;
  Piece tail = piece->second;
  piece->second.end = at;
  pieces.emplace(at, tail);
}

void Hazards::touch(Pieces& pieces, uint64_t begin, uint64_t end, bool reads, bool writes, OpId op,
                    Lane lane) {
  split(pieces, begin);
  split(pieces, end);
  auto first = pieces.lower_bound(begin), last = pieces.lower_bound(end);
  for (auto it = first; it != last; ++it) {
    Piece& piece = it->second;
    if (piece.writer.valid()) candidates_.push_back(piece.writer);
    if (writes) {
      for (const OpId reader : piece.readers) {
        if (reader.valid()) candidates_.push_back(reader);
      }
    } else if (reads) {
      piece.readers[static_cast<size_t>(lane)] = op;
    }
  }
  if (writes) {
    pieces.erase(first, last);
    pieces.emplace(begin, Piece{end, op, {}});
    return;
  }
  // Ranges nobody wrote yet in this program still need their readers on record.
  uint64_t at = begin;
  for (auto it = pieces.lower_bound(begin); at < end;) {
    const uint64_t gap_end = it == pieces.end() ? end : std::min(end, it->first);
    if (gap_end > at) {
      Piece piece{gap_end, OpId{}, {}};
      piece.readers[static_cast<size_t>(lane)] = op;
      pieces.emplace(at, piece);
      at = gap_end;
    } else {
      at = it->second.end;
      ++it;
    }
  }
}

bool Hazards::implied(OpId dep, const std::array<uint32_t, kLanes>& clock) const {
  return clock[static_cast<size_t>(lanes_[dep.value])] > positions_[dep.value];
}

std::vector<OpId> Hazards::add(Lane lane, std::span<const Access> accesses, bool nvme_read,
                               bool nvme_write, OpId extra) {
  const OpId op{static_cast<uint32_t>(clocks_.size())};
  candidates_.clear();
  if (extra.valid()) candidates_.push_back(extra);
  for (const Access& a : accesses) {
    const bool reads = a.mode != AccessMode::write, writes = a.mode != AccessMode::read;
    touch(slots_[a.slot.value], a.offset, a.offset + a.bytes, reads, writes, op, lane);
    if (nvme_read || nvme_write) {
      touch(nvme_[a.page.value], 0, 1, nvme_read, nvme_write, op, lane);
    }
  }
  std::sort(candidates_.begin(), candidates_.end(),
            [](OpId a, OpId b) { return a.value > b.value; });

  std::array<uint32_t, kLanes> clock{};
  const auto join = [&](OpId dep) {
    for (size_t l = 0; l < kLanes; ++l) clock[l] = std::max(clock[l], clocks_[dep.value][l]);
    uint32_t& own = clock[static_cast<size_t>(lanes_[dep.value])];
    own = std::max(own, positions_[dep.value] + 1);
  };
  const auto lane_index = static_cast<size_t>(lane);
  if (lane_last_[lane_index].valid()) join(lane_last_[lane_index]);
  std::vector<OpId> deps;
  for (const OpId candidate : candidates_) {
    if (candidate == op || implied(candidate, clock)) continue;
    deps.push_back(candidate);
    join(candidate);
  }
  clocks_.push_back(clock);
  lanes_.push_back(lane);
  positions_.push_back(lane_size_[lane_index]++);
  lane_last_[lane_index] = op;
  return deps;
}

}  // namespace overspill
