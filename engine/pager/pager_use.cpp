// Acquiring, prefetching and releasing layers.
#include <algorithm>
#include <chrono>

#include "engine/base/error.h"
#include "engine/base/units.h"
#include "engine/pager/pager.h"

namespace overspill {
namespace {

using Kind = PagerWork::Kind;

/// A layer of the ring is never held by an update alone, so that one place is left for them.
constexpr size_t kSpare = 1;

}  // namespace

void Pager::declare_order(std::vector<uint32_t> order) {
  const Lock lock(mutex_);
  if (order.empty()) refuse(Misuse::bad_argument, "an order without layers");
  for (const uint32_t layer : order) checked_layer(layer);
  order_.declare(std::move(order));
}

bool Pager::has_room(std::span<const uint32_t> stored, std::span<const uint32_t> keep,
                     size_t spare) {
  size_t missing = 0, kept = 0;
  for (const uint32_t l : stored) missing += needs_slot(l) && ring_.find(l) == nullptr;
  for (const uint32_t l : keep) {
    const WeightRing::Entry* entry = ring_.find(l);
    kept += entry != nullptr && entry->holds == 0;
  }
  if (ring_.size() >= slot_layers_) spare = 0;  // every layer has a place of its own
  if (missing == 0 && spare == 0) return true;
  return missing + ring_.held() + kept + spare <= ring_.size();
}

void Pager::evict(WeightRing::Entry& victim) {
  if (victim.unused && victim.layer != WeightRing::kNobody) {
    counts_.deviation_bytes += weight_bytes(victim.layer);
  }
  WeightRing::empty(victim);
}

bool Pager::bring(std::span<const uint32_t> stored, std::span<const uint32_t> keep, bool ahead) {
  std::vector<uint32_t> kept(keep.begin(), keep.end());
  kept.insert(kept.end(), stored.begin(), stored.end());
  std::ranges::sort(kept);
  kept.erase(std::ranges::unique(kept).begin(), kept.end());
  if (!has_room(stored, kept, 0)) return false;
  for (const uint32_t l : stored) {
    StoredLayer& layer = stored_[l];
    PagerWork work{.kind = Kind::bring, .layer = l};
    if (needs_slot(l)) {
      WeightRing::Entry* entry = ring_.find(l);
      work.place.present = entry != nullptr;
      if (entry == nullptr) {
        entry = ring_.victim(kept);
        CHECK(entry != nullptr);
        evict(*entry);
        entry->layer = l;
        entry->unused = ahead;
      } else if (!ahead) {
        entry->unused = false;
      }
      ring_.use(*entry);
      work.place.slot = entry->slot;
      if (work.place.present && !is_behind(l)) continue;
      work.after = entry->uses.take();
    } else if (is_behind(l)) {
      work.after = layer.uses.take();
    } else {
      continue;
    }
    layer.updated = steps_;
    layer.ready = thread_.add(std::move(work));
  }
  return true;
}

void Pager::acquire(uint32_t index, std::span<const void*> out, void* stream) {
  Lock lock(mutex_);
  require_running();
  const RegisteredLayer& layer = checked_layer(index);
  if (!out.empty() && out.size() != layer.tensors.size()) {
    refuse(Misuse::size_mismatch, "layer {} \"{}\" has {} tensors; there is room for {} pointers",
           index, layer.name, layer.tensors.size(), out.size());
  }
  if (acquired_[index]) {
    refuse(Misuse::already_acquired, "layer {} \"{}\" is held already; release it first", index,
           layer.name);
  }
  require_weights();
  // What is held stays what it is; the others are brought.
  std::vector<uint32_t> wanted;
  for (const uint32_t l : layer.stored) {
    if (stored_[l].holds == 0) wanted.push_back(l);
  }
  if (!has_room(wanted, wanted, kSpare)) {
    refuse(Misuse::no_slot,
           "layer {} \"{}\": {} of the {} weight slots are held; release a layer, or create the "
           "engine with a higher held_layers",
           index, layer.name, ring_.held(), ring_.size());
  }
  const auto expected = order_.visit(index);
  if (expected) note_deviation(index, *expected);
  CHECK(bring(wanted, {}, false));
  uint64_t ready = 0;
  for (const uint32_t l : layer.stored) {
    if (stored_[l].holds++ == 0 && needs_slot(l)) ++ring_.find(l)->holds;
    if (gpu_ != nullptr) stored_[l].streams.push_back(stream);
    ready = std::max(ready, stored_[l].ready);
  }
  acquired_[index] = true;
  ++counts_.acquires;
  prefetch_next();
  for (size_t t = 0; t < out.size(); ++t) {
    const TensorPlace& place = layer.tensors[t];
    out[t] = weights(place.stored_layer) +
             registry_.stored(place).offset * layout_.options.weight_bytes();
  }
  if (thread_.done(ready)) return;
  ++counts_.waited;
  lock.unlock();
  const auto start = std::chrono::steady_clock::now();
  thread_.wait(ready);
  const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - start;
  lock.lock();
  counts_.wait_seconds += waited.count();
}

void Pager::note_deviation(uint32_t index, uint32_t expected) {
  const RegisteredLayer& layer = registry_.layers()[index];
  uint64_t bytes = 0;
  for (const uint32_t l : layer.stored) {
    if (needs_slot(l) && ring_.find(l) == nullptr) bytes += weight_bytes(l);
  }
  ++counts_.deviations;
  counts_.deviation_bytes += bytes;
  if (!told_.insert(index).second) return;
  options_.warn(fmt::format(
      "layer {} \"{}\" is acquired where layer {} \"{}\" comes in the order: {} are "
      "loaded while the program waits; declare the order of a step if it has changed "
      "(this is said once for a layer)",
      index, layer.name, expected, registry_.layers()[expected].name, format_bytes(bytes)));
}

/// As far as slots allow, the layers that come next. Updates in this step must not be run ahead of
/// the step: the order ends with it.
void Pager::prefetch_next() {
  std::vector<uint32_t> keep;
  for (const uint32_t next : order_.next(layout_.prefetch_depth)) {
    if (acquired_[next]) continue;
    std::vector<uint32_t> wanted;
    for (const uint32_t l : registry_.layers()[next].stored) {
      if (stored_[l].holds == 0) wanted.push_back(l);
    }
    if (!bring(wanted, keep, true)) return;
    keep.insert(keep.end(), wanted.begin(), wanted.end());
  }
}

void Pager::prefetch(uint32_t index) {
  const Lock lock(mutex_);
  require_running();
  const RegisteredLayer& layer = checked_layer(index);
  require_weights();
  if (acquired_[index]) return;
  std::vector<uint32_t> wanted;
  for (const uint32_t l : layer.stored) {
    if (stored_[l].holds == 0) wanted.push_back(l);
  }
  bring(wanted, {}, true);
}

/// Of a layer that is about to change, held or not.
StreamPoints Pager::take_uses(uint32_t stored, MemoryUses& uses) {
  for (void* const stream : stored_[stored].streams) end_use(uses, stream);
  return uses.take();
}

void Pager::end_use(MemoryUses& uses, void* stream) {
  call_gpu([&] { uses.end_on(gpu_, stream); });
}

/// A GPU that fails stops the engine.
void Pager::call_gpu(const std::function<void()>& call) {
  try {
    call();
  } catch (const MisuseError&) {
    throw;
  } catch (const Error&) {
    thread_.stop(std::current_exception());
    require_running();
  }
}

void Pager::release(uint32_t index, void* stream) {
  const Lock lock(mutex_);
  require_running();
  const RegisteredLayer& layer = checked_layer(index);
  if (!acquired_[index]) {
    refuse(Misuse::not_acquired, "layer {} \"{}\" is not held", index, layer.name);
  }
  acquired_[index] = false;
  for (const uint32_t l : layer.stored) {
    WeightRing::Entry* const entry = needs_slot(l) ? ring_.find(l) : nullptr;
    end_use(entry != nullptr ? entry->uses : stored_[l].uses, stream);
    if (--stored_[l].holds == 0) stored_[l].streams.clear();
    if (stored_[l].holds > 0 || entry == nullptr) continue;
    --entry->holds;
    if (entry->stale) evict(*entry);
  }
  prefetch_next();
}

/// Where a layer that nothing brings is updated. The work begins behind what used the place.
void Pager::choose_place(uint32_t stored, PagerWork& work) {
  WeightRing::Entry* entry = ring_.find(stored);
  const bool present = entry != nullptr;
  if (layout_.compute_addresses(layout_.page(layout_.weight(stored, 0)))) {
    if (present) leave_stale(*entry);  // what other ranks have is updated as well
    append(work.after, take_uses(stored, stored_[stored].uses));
    return;
  }
  if (!present) entry = ring_.victim({});
  CHECK(entry != nullptr);
  work.place = {entry->slot, present};
  append(work.after, take_uses(stored, entry->uses));
  if (!present) evict(*entry);
  // On a host that shares the device's memory, what is there is updated in its place. Otherwise an
  // update does not leave all of the layer's new weights.
  const bool in_place = layout_.options.unified && !layout_.options.gathers_weights();
  if (present && !in_place) leave_stale(*entry);
  ring_.use(*entry);
}

void Pager::leave_stale(WeightRing::Entry& entry) {
  if (entry.holds == 0) return evict(entry);
  entry.stale = true;
}

void Pager::catch_up(uint32_t stored) {
  if (!is_behind(stored)) return;
  stored_[stored].updated = steps_;
  PagerWork work{.kind = Kind::update, .layer = stored};
  choose_place(stored, work);
  stored_[stored].ready = thread_.add(std::move(work));
}

AccessCounts Pager::access_counts() {
  const Lock lock(mutex_);
  return counts_;
}

}  // namespace overspill
