// Which stored layer each slot of the weight ring will hold once all work that is queued is done.
// Decided when work is queued, from the program's calls alone, so that ranks that make the same
// calls bring the same layers in the same order. One thread at a time.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/pager/memory_uses.h"
#include "engine/program/program.h"

namespace overspill {

class WeightRing {
 public:
  static constexpr uint32_t kNobody = UINT32_MAX;
  struct Entry {
    SlotId slot;
    uint32_t layer = kNobody;
    uint64_t last_use = 0;
    uint32_t holds = 0;
    bool stale = false;   ///< not the layer's weights any more; kept while it is held
    bool unused = false;  ///< brought ahead and not acquired yet
    MemoryUses uses;      ///< of the slot, whatever it held
  };

  explicit WeightRing(const std::vector<SlotId>& slots);
  /// Null where the layer is not there.
  Entry* find(uint32_t layer);
  /// The entry, neither held nor with a layer of `keep`, that was used least recently; or null.
  Entry* victim(std::span<const uint32_t> keep);
  void use(Entry& entry) { entry.last_use = ++clock_; }
  size_t size() const { return entries_.size(); }
  size_t held() const;
  /// The slot holds nothing any more.
  static void empty(Entry& entry);
  /// Of all slots.
  StreamPoints take_uses();
  /// Nothing is there any more. No layer is held.
  void clear();

 private:
  std::vector<Entry> entries_;
  uint64_t clock_ = 0;
};

}  // namespace overspill
