// The same decisions as engine/pager's, without its threads.
#include "tests/unit/engine/plan/fragment_driver.h"

#include <algorithm>

#include "engine/base/error.h"

namespace overspill::test {
namespace {

using Kind = FragmentPart::Kind;

}  // namespace

FragmentDriver::FragmentDriver(const Layout& layout, uint64_t seed, Visit visit)
    : layout_(layout),
      random_(seed),
      visit_(std::move(visit)),
      verifier_(layout),
      state_(layout.model.layers.size()),
      pending_(state_.size()),
      moments_zero_(state_.size(), 1),
      has_gradient_(state_.size()) {
  for (const SlotId slot : layout.weight_ring) ring_.push_back({.slot = slot, .layer = {}});
  for (const SlotId slot : layout.gradient_ring) sum_slots_.push_back({.slot = slot, .layer = {}});
}

bool FragmentDriver::needs_slot(uint32_t l) const {
  return layout_.options.gathers_weights() ||
         !layout_.compute_addresses(layout_.page(layout_.weight(l, 0)));
}

void FragmentDriver::step() {
  contributions_ = 1 + below(3);
  const bool all = !one_in(4);  // else some gradients are missing
  const uint32_t events = 10 * layers();
  for (uint32_t i = 0; i < events; ++i) event();
  for (uint32_t l = layers(); l-- > 0;) {
    while (all && trainable(l) && !state_[l].complete) add_gradient(l);
  }
  for (uint32_t l = 0; l < layers(); ++l) {
    has_gradient_[l] = state_[l].complete || state_[l].sums != Sums::none;
    if (state_[l].complete || !has_gradient_[l]) continue;
    if (state_[l].sums == Sums::paged) take_slot(l);
    complete(l);
  }
  for (uint32_t l = 0; l < layers(); ++l) catch_up(l);
  run();
  decide();
  ++steps_;
  for (Layer& layer : state_) layer.complete = false, layer.count = 0;
}

void FragmentDriver::flush() {
  for (uint32_t l = 0; l < layers(); ++l) release(l);
  for (uint32_t l = 0; l < layers(); ++l) catch_up(l);
  run();
}

void FragmentDriver::event() {
  const uint32_t l = below(layers());
  switch (below(6)) {
    case 0: return bring({l}, true);
    case 1: return bring({l, (l + 1 + below(layers() - 1)) % layers()}, true);
    case 2: return bring({l}, false);
    case 3: return release(l);
    case 4:
      if (trainable(l) && !state_[l].complete) add_gradient(l);
      return;
    default:
      if (one_in(3)) run();
  }
}

FragmentDriver::Entry* FragmentDriver::find(uint32_t l) {
  const auto found = std::ranges::find(ring_, std::optional(l), &Entry::layer);
  return found == ring_.end() ? nullptr : &*found;
}

FragmentDriver::Entry* FragmentDriver::victim(std::span<const uint32_t> keep) {
  Entry* oldest = nullptr;
  for (Entry& entry : ring_) {
    const bool kept = entry.layer && std::ranges::find(keep, *entry.layer) != keep.end();
    if (entry.held || kept) continue;
    if (oldest == nullptr || entry.last_use < oldest->last_use) oldest = &entry;
  }
  return oldest;
}

/// What is held is not brought again. One place is left for updates, if any can need it.
void FragmentDriver::bring(std::vector<uint32_t> wanted, bool hold) {
  std::erase_if(wanted, [&](uint32_t l) { return state_[l].held; });
  size_t missing = 0, held = 0, kept = 0, need_slots = 0;
  for (uint32_t l = 0; l < layers(); ++l) need_slots += needs_slot(l);
  for (const Entry& entry : ring_) held += entry.held;
  for (const uint32_t l : wanted) {
    missing += needs_slot(l) && find(l) == nullptr;
    kept += needs_slot(l) && find(l) != nullptr;
  }
  const size_t spare = hold && ring_.size() < need_slots ? 1 : 0;
  if (missing + held + kept + spare > ring_.size()) return;
  for (const uint32_t l : wanted) {
    FragmentPart part{Kind::bring, l};
    if (needs_slot(l)) {
      Entry* entry = find(l);
      part.place.present = entry != nullptr;
      if (entry == nullptr) {
        entry = victim(wanted);
        *entry = {.slot = entry->slot, .layer = l};
      }
      entry->last_use = ++clock_;
      part.place.slot = entry->slot;
      entry->held = hold;
    }
    state_[l].held = hold;
    if ((part.place.present || !needs_slot(l)) && !is_behind(l)) continue;
    state_[l].updated = steps_;
    plan(part);
  }
  if (hold && one_in(2)) run();  // the program waits
}

void FragmentDriver::release(uint32_t l) {
  if (!state_[l].held) return;
  state_[l].held = false;
  if (!needs_slot(l)) return;
  Entry& entry = *find(l);
  entry.held = false;
  if (entry.stale) entry = {.slot = entry.slot, .layer = {}};
}

void FragmentDriver::leave_stale(Entry& entry) {
  if (entry.held) {
    entry.stale = true;
  } else {
    entry = {.slot = entry.slot, .layer = {}};
  }
}

RingPlace FragmentDriver::place_for_update(uint32_t l) {
  Entry* entry = find(l);
  const bool present = entry != nullptr;
  if (layout_.compute_addresses(layout_.page(layout_.weight(l, 0)))) {
    if (present) leave_stale(*entry);
    return {};
  }
  if (!present) entry = victim({});
  CHECK(entry != nullptr);
  const RingPlace place{entry->slot, present};
  if (!present) *entry = {.slot = entry->slot, .layer = {}};
  const bool in_place = layout_.options.unified && !layout_.options.gathers_weights();
  if (present && !in_place) leave_stale(*entry);
  entry->last_use = ++clock_;
  return place;
}

void FragmentDriver::catch_up(uint32_t l) {
  if (!is_behind(l)) return;
  state_[l].updated = steps_;
  plan({Kind::update, l, place_for_update(l)});
}

void FragmentDriver::add_gradient(uint32_t l) {
  Layer& layer = state_[l];
  if (layer.sums != Sums::slot) take_slot(l);
  std::ranges::find(sum_slots_, layer.slot, &SumSlot::slot)->last_use = ++clock_;
  if (++layer.count >= contributions_ || one_in(20)) complete(l);
}

void FragmentDriver::take_slot(uint32_t l) {
  const auto rank = [](const SumSlot& s) { return std::pair(s.layer.has_value(), s.last_use); };
  SumSlot& slot = *std::ranges::min_element(sum_slots_, {}, rank);
  if (slot.layer) {
    const uint32_t other = *slot.layer;
    if (!layout_.options.pages_sums(other)) return complete(other), take_slot(l);
    // The update of the step before takes its gradient from where the sums go.
    catch_up(other);
    plan({.kind = Kind::store_sums, .layer = other, .sums = slot.slot});
    state_[other].sums = Sums::paged;
    slot.layer.reset();
    slot.busy = true;
  }
  if (slot.busy) run();
  Layer& layer = state_[l];
  const bool paged = layer.sums == Sums::paged;
  slot.layer = l;
  layer.sums = Sums::slot;
  layer.slot = slot.slot;
  if (!paged) return;
  plan({.kind = Kind::load_sums, .layer = l, .sums = slot.slot});
  run();
}

void FragmentDriver::complete(uint32_t l) {
  catch_up(l);
  FragmentPart part{.kind = Kind::finish_gradient, .layer = l, .sums = state_[l].slot};
  if (in_backward()) part.place = place_for_update(l);
  plan(part);
  for (SumSlot& slot : sum_slots_) {
    if (slot.layer == l) slot.layer.reset(), slot.busy = true;
  }
  state_[l].complete = true;
  state_[l].sums = Sums::none;
}

void FragmentDriver::plan(FragmentPart part) {
  const uint32_t l = part.layer;
  const bool update = part.kind == Kind::finish_gradient ? in_backward() : pending_[l] != 0;
  const bool zero = moments_zero_[l] != 0;
  if (update && zero_ && *zero_ != zero) run();
  if (fragment_ && update && !zero_ && zero) run();
  if (one_in(4)) run();
  if (!fragment_) fragment_ = std::make_unique<FragmentPlanner>(layout_, update && zero);
  if (update) zero_ = zero;
  switch (part.kind) {
    case Kind::bring: fragment_->bring(l, part.place, update); break;
    case Kind::update:
      if (update) fragment_->update(l, part.place);
      break;
    case Kind::finish_gradient: fragment_->finish_gradient(l, part.sums, part.place); break;
    case Kind::store_sums: fragment_->store_sums(l, part.sums); break;
    case Kind::load_sums: fragment_->load_sums(l, part.sums); break;
  }
  if (!update) return;
  if (zero) first_updates_.push_back(l);
  moments_zero_[l] = pending_[l] = 0;
}

void FragmentDriver::run() {
  for (SumSlot& slot : sum_slots_) slot.busy = false;
  zero_.reset();
  if (!fragment_) return;
  const Program program = fragment_->take();
  visit_(program, fragment_->parts(), verifier_);
  fragment_.reset();
}

/// One step of eight is skipped.
void FragmentDriver::decide() {
  const bool skipped = one_in(8);
  if (!in_backward() && !skipped) pending_ = has_gradient_;
  for (const uint32_t l : first_updates_) moments_zero_[l] |= in_backward() && skipped;
  first_updates_.clear();
  verifier_.end_step(pending_);
}

}  // namespace overspill::test
