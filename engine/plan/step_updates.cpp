// Where weights are while a step runs, and the way of a chunk through its optimizer update.
#include <algorithm>
#include <array>

#include "engine/plan/step_planner.h"

namespace overspill {

bool StepPlanner::addresses_home(uint32_t layer) const {
  return layout_.compute_addresses(page(layout_.weight(layer, 0)));
}

StepPlanner::RingEntry* StepPlanner::find_ring(uint32_t layer) {
  const auto found = std::ranges::find(ring_, layer, &RingEntry::layer);
  return found == ring_.end() ? nullptr : &*found;
}

StepPlanner::RingEntry& StepPlanner::take_ring(uint32_t layer) {
  CHECK(!ring_.empty());
  RingEntry& victim = *std::ranges::min_element(ring_, {}, &RingEntry::last_use);
  victim = {victim.slot, layer, ++ring_clock_, false};
  return victim;
}

StepPlanner::RingEntry& StepPlanner::find_or_take_ring(uint32_t layer) {
  RingEntry* held = find_ring(layer);
  return held != nullptr ? *held : take_ring(layer);
}

Location StepPlanner::in_ring(const RingEntry& entry, uint32_t layer, uint32_t c) const {
  return {entry.slot, layout_.chunk(layer, c).begin * layout_.options.weight_bytes()};
}

Location StepPlanner::weights_for_compute(uint32_t layer) {
  if (addresses_home(layer) && !gathers_weights()) return home(layout_.weight(layer, 0));
  RingEntry* entry = find_ring(layer);
  if (entry == nullptr) {
    entry = &take_ring(layer);
    for (uint32_t c = 0; !addresses_home(layer) && c < layout_.chunk_count(layer); ++c) {
      load_weight(layer, c, *entry);
    }
  }
  entry->last_use = ++ring_clock_;
  if (gathers_weights() && !entry->gathered) gather_weights(layer, *entry);
  return {entry->slot, 0};
}

void StepPlanner::load_weight(uint32_t layer, uint32_t c, const RingEntry& entry) {
  const PageId id = layout_.weight(layer, c);
  const Location target = in_ring(entry, layer, c);
  if (page(id).home == Tier::host) return copy(OpKind::copy_to_device, id, home(id), target);
  const Location landing = unified_ ? target : stages_.next();
  transfer(OpKind::read, layer, c, std::array{access(landing, id, AccessMode::write)});
  if (!unified_) copy(OpKind::copy_to_device, id, landing, target);
}

void StepPlanner::gather_weights(uint32_t layer, RingEntry& entry) {
  entry.gathered = true;
  if (!addresses_home(layer)) return gather_in_place(layer, {entry.slot, 0});
  const PageId first = layout_.weight(layer, 0);
  const uint64_t part = layout_.shard(layer) * layout_.options.weight_bytes();
  const Location own = home(first);
  Access whole = layer_weights({entry.slot, 0}, layer);
  whole.mode = AccessMode::write;
  emit(OpKind::all_gather, Lane::collective, layer, 0, part * (layout_.options.ranks - 1),
       {{own.slot, own.offset, part, first, layout_.chunk_count(layer), AccessMode::read}, whole});
}

void StepPlanner::gather_in_place(uint32_t layer, Location whole) {
  const PlanOptions& o = layout_.options;
  const uint64_t part = layout_.shard(layer) * o.weight_bytes();
  const PageId first = layout_.first_whole_weight[layer];
  const PageId own = layout_.weight(layer, layout_.first_own_chunk(layer));
  const uint32_t count = layout_.own_chunk_count(layer), before = own.value - first.value;
  const uint32_t behind = layout_.whole_weight_count(layer) - before - count;
  const uint64_t at = whole.offset + part * o.rank, end = whole.offset + part * o.ranks;
  std::vector<Access> touched = {{whole.slot, at, part, own, count, AccessMode::read}};
  if (before > 0) {
    touched.push_back(
        {whole.slot, whole.offset, at - whole.offset, first, before, AccessMode::write});
  }
  if (behind > 0) {
    touched.push_back(
        {whole.slot, at + part, end - at - part, {own.value + count}, behind, AccessMode::write});
  }
  emit(OpKind::all_gather, Lane::collective, layer, 0, part * (o.ranks - 1), touched);
}

StepPlanner::UpdateWeights StepPlanner::locate_weights(uint32_t layer, uint32_t c,
                                                       const UpdatePass& pass) {
  const PageId id = layout_.weight(layer, c);
  const Tier tier = page(id).home;
  const bool on_device = updates_on_device(layer);
  const bool in_place =
      unified_ ? tier != Tier::nvme : tier == (on_device ? Tier::device : Tier::host);
  if (in_place) return {home(id), false};
  if ((unified_ || on_device) && !pass.aside) {
    return {in_ring(find_or_take_ring(layer), layer, c), !pass.in_ring};
  }
  return {stages_.next(), true};
}

Location StepPlanner::fetch_gradient(uint32_t layer, uint32_t c, std::vector<Access>& reads) {
  const PageId id = layout_.gradient(layer, c);
  const Tier tier = page(id).home;
  const bool on_device = updates_on_device(layer);
  if (unified_ ? tier != Tier::nvme : tier == (on_device ? Tier::device : Tier::host)) {
    return home(id);
  }
  if (tier == Tier::nvme) {
    const Location stage = stages_.next();
    reads.push_back(access(stage, id, AccessMode::write));
    return stage;
  }
  const Location stage = on_device ? device_stages_.next() : stages_.next();
  copy(on_device ? OpKind::copy_to_device : OpKind::copy_to_host, id, home(id), stage);
  return stage;
}

void StepPlanner::plan_update(uint32_t layer, uint32_t c, std::optional<Access> gradient,
                              const UpdatePass& pass) {
  const PageId w = layout_.weight(layer, c), o = layout_.optimizer(layer, c);
  const bool on_device = updates_on_device(layer);
  const UpdateWeights weights = locate_weights(layer, c, pass);
  std::vector<Access> reads;
  if (weights.fetch) fetch_weights(layer, c, weights.at, reads);
  const bool record = page(o).home == Tier::nvme && page(o).bytes > 0;
  const Location state = record ? records_.next() : home(o);
  const uint64_t remainder = layout_.state(layout_.chunk(layer, c)).remainder_bytes();
  const bool moments_written_only = kind_.moments_zero && page(o).bytes > remainder;
  const uint64_t state_bytes = moments_written_only ? remainder : page(o).bytes;
  if (record && state_bytes > 0) {
    reads.push_back(access(state, o, AccessMode::write, state_bytes));
  }
  if (!gradient) {
    const PageId g = layout_.gradient(layer, c);
    Location at = fetch_gradient(layer, c, reads);
    const bool lift = on_device && page(g).home == Tier::nvme;
    transfer(OpKind::read, layer, c, reads);
    if (lift) {
      const Location device = device_stages_.next();
      copy(OpKind::copy_to_device, g, at, device);
      at = device;
    }
    gradient = access(at, g, AccessMode::read);
  } else {
    transfer(OpKind::read, layer, c, reads);
  }
  finish_fetch(layer, c, weights);

  std::vector<Access> touched = {access(weights.at, w, AccessMode::update), *gradient};
  if (moments_written_only && remainder > 0) {  // read before the page is rewritten
    touched.push_back(access(state, o, AccessMode::read, remainder));
  }
  if (page(o).bytes > 0) {
    touched.push_back(
        access(state, o, moments_written_only ? AccessMode::write : AccessMode::update));
  }
  emit(OpKind::update, on_device ? Lane::compute : Lane::optimizer, layer, c,
       layout_.chunk(layer, c).parameters, touched);
  write_back(layer, c, weights, state, pass);
}

void StepPlanner::fetch_weights(uint32_t layer, uint32_t c, Location at,
                                std::vector<Access>& reads) {
  const PageId id = layout_.weight(layer, c);
  switch (page(id).home) {
    case Tier::host: return copy(OpKind::copy_to_device, id, home(id), at);
    case Tier::device: return copy(OpKind::copy_to_host, id, home(id), at);
    case Tier::nvme: break;
  }
  const bool to_device = !unified_ && updates_on_device(layer);
  device_landing_ = to_device ? stages_.next() : at;
  reads.push_back(access(device_landing_, id, AccessMode::write));
}

void StepPlanner::finish_fetch(uint32_t layer, uint32_t c, const UpdateWeights& weights) {
  const PageId id = layout_.weight(layer, c);
  if (weights.fetch && page(id).home == Tier::nvme && !unified_ && updates_on_device(layer)) {
    copy(OpKind::copy_to_device, id, device_landing_, weights.at);
  }
}

void StepPlanner::write_back(uint32_t layer, uint32_t c, const UpdateWeights& weights,
                             Location state, const UpdatePass& pass) {
  const PageId w = layout_.weight(layer, c), o = layout_.optimizer(layer, c);
  const bool on_device = updates_on_device(layer);
  Location source = weights.at;
  if (on_device && page(w).home != Tier::device) {
    const bool stage = page(w).home == Tier::nvme;
    const Location target = stage ? stages_.next() : home(w);
    copy(OpKind::copy_to_host, w, weights.at, target);
    source = target;
  } else if (!unified_ && !on_device) {
    if (page(w).home == Tier::device) {
      copy(OpKind::copy_to_device, w, weights.at, home(w));
    } else if (pass.for_compute) {
      copy(OpKind::copy_to_device, w, weights.at, in_ring(find_or_take_ring(layer), layer, c));
    }
  }
  if (!pass.writes) return;
  std::vector<Access> writes;
  if (page(w).home == Tier::nvme) writes.push_back(access(source, w, AccessMode::read));
  if (page(o).home == Tier::nvme && page(o).bytes > 0) {
    writes.push_back(access(state, o, AccessMode::read));
  }
  transfer(OpKind::write, layer, c, writes);
}

void StepPlanner::share_update(uint32_t layer, bool was_in_ring) {
  if (addresses_home(layer)) return gather_in_place(layer, home(layout_.weight(layer, 0)));
  RingEntry& entry = find_or_take_ring(layer);
  const uint32_t first = layout_.first_own_chunk(layer);
  for (uint32_t c = first; !was_in_ring && c < first + layout_.own_chunk_count(layer); ++c) {
    if (!layout_.chunk(layer, c).trainable()) load_weight(layer, c, entry);
  }
  gather_in_place(layer, {entry.slot, 0});
  write_peer_weights(layer, entry);
}

void StepPlanner::write_peer_weights(uint32_t layer, const RingEntry& entry) {
  for (uint32_t c = 0; c < layout_.chunk_count(layer); ++c) {
    const Chunk& chunk = layout_.chunk(layer, c);
    if (layout_.owns(chunk) || !chunk.trains) continue;
    const PageId id = layout_.weight(layer, c);
    Location source = in_ring(entry, layer, c);
    if (!unified_) {
      const Location target = page(id).home == Tier::host ? home(id) : stages_.next();
      copy(OpKind::copy_to_host, id, source, target);
      source = target;
    }
    if (page(id).home != Tier::nvme) continue;
    transfer(OpKind::write, layer, c, std::array{access(source, id, AccessMode::read)});
  }
}

void StepPlanner::plan_pending_update(uint32_t layer, const UpdatePass& pass) {
  if (!trainable(layer)) return;
  const uint32_t chunks = layout_.chunk_count(layer);
  for (uint32_t c = 0; c < chunks; ++c) {
    if (layout_.chunk(layer, c).trainable()) plan_update(layer, c, std::nullopt, pass);
  }
  if (gathers_updates(layer) && !pass.repeated) return share_update(layer, pass.in_ring);
  if (!pass.for_compute || pass.in_ring || addresses_home(layer)) return;
  // The updates have handed their chunks to the ring; frozen ones join them there.
  const RingEntry& entry = find_or_take_ring(layer);
  for (uint32_t c = 0; c < chunks; ++c) {
    if (!layout_.chunk(layer, c).trainable()) load_weight(layer, c, entry);
  }
}

void StepPlanner::plan_repeated_update(uint32_t layer, bool for_compute) {
  // What the ring still holds since the forward are the new weights.
  const bool fills = for_compute && find_ring(layer) == nullptr;
  plan_pending_update(layer, {.for_compute = fills, .repeated = true, .aside = !fills});
}

void StepPlanner::plan_flush(uint32_t layer) {
  if (!trainable(layer)) return;
  // Where the other ranks' new weights come in by the ring, this rank's must be there too.
  plan_pending_update(layer, {.for_compute = gathers_updates(layer)});
  const OpId last{static_cast<uint32_t>(program_.ops.size()) - 1};
  end_layer(last);
  begin_layer();
}

}  // namespace overspill
