// Least recently used.
#include "engine/pager/weight_ring.h"

#include <algorithm>
#include <utility>

#include "engine/base/error.h"

namespace overspill {

WeightRing::WeightRing(const std::vector<SlotId>& slots) {
  for (const SlotId slot : slots) entries_.emplace_back().slot = slot;
}

WeightRing::Entry* WeightRing::find(uint32_t layer) {
  const auto found = std::ranges::find(entries_, layer, &Entry::layer);
  return found == entries_.end() ? nullptr : &*found;
}

WeightRing::Entry* WeightRing::victim(std::span<const uint32_t> keep) {
  Entry* oldest = nullptr;
  for (Entry& entry : entries_) {
    if (entry.holds > 0 || std::ranges::find(keep, entry.layer) != keep.end()) continue;
    if (oldest == nullptr || entry.last_use < oldest->last_use) oldest = &entry;
  }
  return oldest;
}

size_t WeightRing::held() const {
  return static_cast<size_t>(
      std::ranges::count_if(entries_, [](const Entry& entry) { return entry.holds > 0; }));
}

void WeightRing::empty(Entry& entry) {
  CHECK(entry.holds == 0);
  Entry cleared;
  cleared.slot = entry.slot;
  cleared.uses = std::move(entry.uses);
  entry = std::move(cleared);
}

StreamPoints WeightRing::take_uses() {
  StreamPoints all;
  for (Entry& entry : entries_) append(all, entry.uses.take());
  return all;
}

void WeightRing::clear() {
  for (Entry& entry : entries_) empty(entry);
}

}  // namespace overspill
