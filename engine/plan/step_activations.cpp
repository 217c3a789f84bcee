// Working copies of activation pages in the device's slots: the page whose next use is farthest
// makes room (Belady 1966), since the step's order is known.
#include <array>

#include "engine/plan/step_planner.h"

namespace overspill {

uint64_t StepPlanner::now(uint32_t stage, uint32_t mb) const {
  return uint64_t{stage} * kind_.micro_batches + mb;
}

uint64_t StepPlanner::next_use(const Page& p, uint64_t now) const {
  const uint64_t g = kind_.micro_batches, mb = p.index, turn = 2 * uint64_t{head()};
  const auto at = [&](uint64_t stage) { return stage * g + mb; };
  if (p.kind == PageKind::activation_gradient) {
    const uint64_t next = at(now / g) >= now ? now / g : now / g + 1;
    return kind_.backward && next <= turn - lowest_ ? at(next) : UINT64_MAX;
  }
  if (at(p.layer) >= now) return at(p.layer);
  const uint64_t backward = at(turn - p.layer);
  const bool passes = kind_.backward && p.layer >= lowest_ && p.layer < head();
  return passes && backward >= now ? backward : UINT64_MAX;
}

Location StepPlanner::activation(PageId id, bool fresh, uint64_t now) {
  if (layout_.compute_addresses(page(id))) return home(id);
  for (CacheEntry& entry : cache_) {
    if (entry.page == id) {
      entry.dirty |= fresh;
      return {entry.slot, 0};
    }
  }
  CacheEntry* victim = nullptr;  // Belady: the page whose next use is farthest
  uint64_t farthest = 0;
  for (CacheEntry& entry : cache_) {
    const uint64_t use =
        entry.page.value == UINT32_MAX ? UINT64_MAX : next_use(page(entry.page), now);
    if (victim == nullptr || use > farthest) victim = &entry, farthest = use;
  }
  CHECK(victim != nullptr);
  if (victim->page.value != UINT32_MAX && victim->dirty && farthest != UINT64_MAX) {
    spill_activation(victim->page, {victim->slot, 0});
  }
  *victim = {victim->slot, id, fresh};
  if (!fresh) load_activation(id, {victim->slot, 0});
  return {victim->slot, 0};
}

void StepPlanner::mark_dirty(PageId id) {
  for (CacheEntry& entry : cache_) {
    if (entry.page == id) entry.dirty = true;
  }
}

void StepPlanner::spill_activation(PageId id, Location from) {
  const Page& p = page(id);
  if (p.home == Tier::host) return copy(OpKind::copy_to_host, id, from, home(id));
  Location source = from;
  if (!unified_) {
    source = activation_stages_.next();
    copy(OpKind::copy_to_host, id, from, source);
  }
  transfer(OpKind::write, p.layer, p.index, std::array{access(source, id, AccessMode::read)});
}

void StepPlanner::load_activation(PageId id, Location to) {
  const Page& p = page(id);
  if (p.home == Tier::host) return copy(OpKind::copy_to_device, id, home(id), to);
  const Location landing = unified_ ? to : activation_stages_.next();
  transfer(OpKind::read, p.layer, p.index, std::array{access(landing, id, AccessMode::write)});
  if (!unified_) copy(OpKind::copy_to_device, id, landing, to);
}

}  // namespace overspill
