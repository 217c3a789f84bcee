// Emits a step's ops in order. Placement is the layout's; this file decides what is fetched when,
// into which slot, and what is written back. Dependencies follow from the accesses (hazards.h).
#include "engine/plan/planner.h"

#include <algorithm>
#include <array>
#include <optional>

#include "engine/base/error.h"
#include "engine/plan/hazards.h"

namespace overspill {
namespace {

/// Where a page is at the moment.
struct Location {
  SlotId slot;
  uint64_t offset = 0;
};

/// Slots handed out in turn; reuse is ordered by hazards.
class Pool {
 public:
  explicit Pool(const std::vector<SlotId>& slots) : slots_(slots) {}
  Location next() {
    CHECK(!slots_.empty());
    return {slots_[turn_++ % slots_.size()], 0};
  }

 private:
  const std::vector<SlotId>& slots_;
  size_t turn_ = 0;
};

class StepPlanner {
 public:
  StepPlanner(const Layout& layout, const StepKind& kind)
      : layout_(layout),
        kind_(kind),
        unified_(layout.options.unified),
        hazards_(layout.slots.size(), layout.pages.size()),
        stages_(layout.stages),
        records_(layout.records),
        device_stages_(layout.device_stages),
        activation_stages_(layout.activation_stages),
        gradients_(layout.gradient_ring) {
    program_.kind = kind;
    for (const SlotId slot : layout.weight_ring) ring_.push_back({slot, kNobody, 0});
    for (const SlotId slot : layout.activation_slots) cache_.push_back({slot, PageId{}, false});
  }

  Program plan() {
    CHECK(kind_.micro_batches > 0 && kind_.micro_batches <= layout_.options.micro_batches);
    if (!kind_.forward) {
      for (uint32_t l = 0; l <= head(); ++l) plan_flush(l);
      return std::move(program_);
    }
    for (uint32_t l = 0; l < head(); ++l) plan_forward(l);
    plan_head();
    for (uint32_t l = head(); kind_.backward && l-- > 0;) plan_backward(l);
    return std::move(program_);
  }

 private:
  static constexpr uint32_t kNobody = UINT32_MAX;
  struct RingEntry {
    SlotId slot;
    uint32_t layer;
    uint64_t last_use;
  };
  struct CacheEntry {
    SlotId slot;
    PageId page;
    bool dirty;
  };

  uint32_t head() const { return layout_.model.head(); }
  bool tied() const { return layout_.model.config.tie_word_embeddings; }
  const Page& page(PageId id) const { return layout_.page(id); }
  Location home(PageId id) const { return {page(id).home_slot, page(id).home_offset}; }
  bool updates_in_backward() const { return layout_.options.update == UpdateTiming::in_backward; }
  /// AdamW runs where the optimizer state lives, on the host when it is on NVMe.
  bool updates_on_device(uint32_t layer) const {
    return !unified_ && page(layout_.optimizer(layer, 0)).home == Tier::device;
  }

  Access access(Location at, PageId id, AccessMode mode) const {
    return {at.slot, at.offset, page(id).bytes, id, 1, mode};
  }
  Access access(Location at, PageId id, AccessMode mode, uint64_t bytes) const {
    return {at.slot, at.offset, bytes, id, 1, mode};
  }
  Access layer_weights(Location at, uint32_t layer) const {
    const uint64_t bytes = layout_.model.layers[layer].padded * layout_.options.weight_bytes();
    return {at.slot,         at.offset, bytes, layout_.weight(layer, 0), layout_.chunk_count(layer),
            AccessMode::read};
  }

  OpId emit(OpKind kind, Lane lane, uint32_t layer, uint32_t index, uint64_t work,
            std::initializer_list<Access> accesses) {
    return emit(kind, lane, layer, index, work, std::span(accesses.begin(), accesses.size()));
  }
  OpId emit(OpKind kind, Lane lane, uint32_t layer, uint32_t index, uint64_t work,
            std::span<const Access> accesses) {
    const bool loads = kind == OpKind::read || kind == OpKind::copy_to_device;
    const std::vector<OpId> deps = hazards_.add(lane, accesses, kind == OpKind::read,
                                                kind == OpKind::write, loads ? load_gate_ : OpId{});
    Op op{kind, lane, layer, index, work};
    op.first_access = static_cast<uint32_t>(program_.accesses.size());
    op.access_count = static_cast<uint32_t>(accesses.size());
    op.first_dep = static_cast<uint32_t>(program_.deps.size());
    op.dep_count = static_cast<uint32_t>(deps.size());
    program_.accesses.insert(program_.accesses.end(), accesses.begin(), accesses.end());
    program_.deps.insert(program_.deps.end(), deps.begin(), deps.end());
    program_.ops.push_back(op);
    return {static_cast<uint32_t>(program_.ops.size()) - 1};
  }

  /// One NVMe op over several pages; their slots' accesses are all writes or all reads.
  void transfer(OpKind kind, uint32_t layer, uint32_t index, std::span<const Access> accesses) {
    if (accesses.empty()) return;
    uint64_t bytes = 0;
    for (const Access& a : accesses) bytes += a.bytes;
    emit(kind, kind == OpKind::read ? Lane::nvme_read : Lane::nvme_write, layer, index, bytes,
         accesses);
  }
  void copy(OpKind kind, PageId id, Location from, Location to) {
    const Page& p = page(id);
    emit(kind, kind == OpKind::copy_to_device ? Lane::h2d : Lane::d2h, p.layer, p.index, p.bytes,
         {access(from, id, AccessMode::read), access(to, id, AccessMode::write)});
  }

  // ---- pacing ------------------------------------------------------------------------------

  /// Loads for the next layer may start when the layer prefetch_depth + 1 before it has finished.
  void begin_layer() {
    const size_t back = layout_.prefetch_depth + size_t{1};
    load_gate_ = layer_ends_.size() >= back ? layer_ends_[layer_ends_.size() - back] : OpId{};
  }
  void end_layer(OpId last_compute) { layer_ends_.push_back(last_compute); }

  // ---- weights -----------------------------------------------------------------------------

  bool ringed(uint32_t layer) const {
    return !layout_.compute_addresses(page(layout_.weight(layer, 0)));
  }
  RingEntry* find_ring(uint32_t layer) {
    for (RingEntry& entry : ring_) {
      if (entry.layer == layer) {
        entry.last_use = ++ring_clock_;
        return &entry;
      }
    }
    return nullptr;
  }
  /// A ring slot for the layer: the one that holds it, else the least recently used (its content
  /// is then for the caller to fill).
  RingEntry& take_ring(uint32_t layer) {
    CHECK(!ring_.empty());
    RingEntry& victim = *std::min_element(
        ring_.begin(), ring_.end(),
        [](const RingEntry& a, const RingEntry& b) { return a.last_use < b.last_use; });
    victim.layer = layer;
    victim.last_use = ++ring_clock_;
    return victim;
  }
  Location in_ring(const RingEntry& entry, uint32_t layer, uint32_t c) const {
    return {entry.slot, layout_.chunk(layer, c).begin * layout_.options.weight_bytes()};
  }

  /// The layer's weights where kernels can read them, loaded when they are not there yet.
  Location weights_for_compute(uint32_t layer) {
    if (!ringed(layer)) return home(layout_.weight(layer, 0));
    if (const RingEntry* entry = find_ring(layer)) return {entry->slot, 0};
    const RingEntry entry = take_ring(layer);
    for (uint32_t c = 0; c < layout_.chunk_count(layer); ++c) load_weight(layer, c, entry);
    return {entry.slot, 0};
  }
  void load_weight(uint32_t layer, uint32_t c, const RingEntry& entry) {
    const PageId id = layout_.weight(layer, c);
    const Location target = in_ring(entry, layer, c);
    if (page(id).home == Tier::host) return copy(OpKind::copy_to_device, id, home(id), target);
    const Location landing = unified_ ? target : stages_.next();
    transfer(OpKind::read, layer, c, std::array{access(landing, id, AccessMode::write)});
    if (!unified_) copy(OpKind::copy_to_device, id, landing, target);
  }

  // ---- updates -----------------------------------------------------------------------------

  /// Where the update finds a chunk's weights, and whether they must be fetched there first.
  struct UpdateWeights {
    Location at;
    bool fetch = false;
  };
  UpdateWeights locate_weights(uint32_t layer, uint32_t c) {
    const PageId id = layout_.weight(layer, c);
    const Tier tier = page(id).home;
    const bool on_device = updates_on_device(layer);
    const bool in_place =
        unified_ ? tier != Tier::nvme : tier == (on_device ? Tier::device : Tier::host);
    if (in_place) return {home(id), false};
    if (unified_ || on_device) {
      if (c == 0) ring_was_filled_ = find_ring(layer) != nullptr;
      const RingEntry* held = find_ring(layer);
      const RingEntry entry = held != nullptr ? *held : take_ring(layer);
      return {in_ring(entry, layer, c), !ring_was_filled_};
    }
    return {stages_.next(), true};
  }

  /// Where the update finds a chunk's gradient (already in a slot when updating in the backward).
  Location fetch_gradient(uint32_t layer, uint32_t c, std::vector<Access>& reads) {
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

  /// AdamW on one chunk and the way back home. `gradient` is where it lies, when it is not at home;
  /// its page is the gradient's, or the sums' (float32 in place).
  void plan_update(uint32_t layer, uint32_t c, std::optional<Access> gradient, bool for_compute) {
    const PageId w = layout_.weight(layer, c), o = layout_.optimizer(layer, c);
    const bool on_device = updates_on_device(layer);
    const UpdateWeights weights = locate_weights(layer, c);
    std::vector<Access> reads;
    if (weights.fetch) fetch_weights(layer, c, weights.at, reads);
    const bool record = page(o).home == Tier::nvme;
    const Location state = record ? records_.next() : home(o);
    const uint64_t remainder =
        layout_.chunk(layer, c).parameters * layout_.options.remainder_bytes();
    const uint64_t state_bytes = kind_.moments_zero ? remainder : page(o).bytes;
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

    std::vector<Access> touched = {
        access(weights.at, w, AccessMode::update),
        access(state, o, kind_.moments_zero ? AccessMode::write : AccessMode::update), *gradient};
    if (kind_.moments_zero && remainder > 0) {
      touched.push_back(access(state, o, AccessMode::read, remainder));
      std::swap(touched[1], touched[3]);  // the remainder is read before the page is rewritten
    }
    emit(OpKind::update, on_device ? Lane::compute : Lane::optimizer, layer, c,
         layout_.chunk(layer, c).parameters, touched);
    write_back(layer, c, weights, state, for_compute);
  }

  /// Starts fetching weights for an update: an NVMe segment, or a copy.
  void fetch_weights(uint32_t layer, uint32_t c, Location at, std::vector<Access>& reads) {
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
  void finish_fetch(uint32_t layer, uint32_t c, const UpdateWeights& weights) {
    const PageId id = layout_.weight(layer, c);
    if (weights.fetch && page(id).home == Tier::nvme && !unified_ && updates_on_device(layer)) {
      copy(OpKind::copy_to_device, id, device_landing_, weights.at);
    }
  }

  void write_back(uint32_t layer, uint32_t c, const UpdateWeights& weights, Location state,
                  bool for_compute) {
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
      } else if (for_compute) {
        const RingEntry* held = find_ring(layer);
        const RingEntry entry = held != nullptr ? *held : take_ring(layer);
        copy(OpKind::copy_to_device, w, weights.at, in_ring(entry, layer, c));
      }
    }
    std::vector<Access> writes;
    if (page(w).home == Tier::nvme) writes.push_back(access(source, w, AccessMode::read));
    if (page(o).home == Tier::nvme) writes.push_back(access(state, o, AccessMode::read));
    transfer(OpKind::write, layer, c, writes);
  }

  void plan_pending_update(uint32_t layer, bool for_compute) {
    for (uint32_t c = 0; c < layout_.chunk_count(layer); ++c) {
      plan_update(layer, c, std::nullopt, for_compute);
    }
  }
  void plan_flush(uint32_t layer) {
    plan_pending_update(layer, false);
    const OpId last{static_cast<uint32_t>(program_.ops.size()) - 1};
    end_layer(last);
    begin_layer();
  }

  // ---- activations -------------------------------------------------------------------------

  /// Position of the current op in the step's compute order; pages' next uses follow from it.
  uint64_t now(uint32_t stage, uint32_t mb) const {
    return uint64_t{stage} * kind_.micro_batches + mb;
  }
  /// When the page is used next, from `now` on; UINT64_MAX for never.
  uint64_t next_use(const Page& p, uint64_t now) const {
    const uint64_t g = kind_.micro_batches, mb = p.index, last = 2 * uint64_t{head()};
    const auto at = [&](uint64_t stage) { return stage * g + mb; };
    if (p.kind == PageKind::activation_gradient) {
      const uint64_t next = at(now / g) >= now ? now / g : now / g + 1;
      return kind_.backward && next <= last ? at(next) : UINT64_MAX;
    }
    if (at(p.layer) >= now) return at(p.layer);
    const uint64_t backward = at(last - p.layer);
    return kind_.backward && p.layer < head() && backward >= now ? backward : UINT64_MAX;
  }

  Location activation(PageId id, bool fresh, uint64_t now) {
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
  void mark_dirty(PageId id) {
    for (CacheEntry& entry : cache_) {
      if (entry.page == id) entry.dirty = true;
    }
  }
  void spill_activation(PageId id, Location from) {
    const Page& p = page(id);
    if (p.home == Tier::host) return copy(OpKind::copy_to_host, id, from, home(id));
    Location source = from;
    if (!unified_) {
      source = activation_stages_.next();
      copy(OpKind::copy_to_host, id, from, source);
    }
    transfer(OpKind::write, p.layer, p.index, std::array{access(source, id, AccessMode::read)});
  }
  void load_activation(PageId id, Location to) {
    const Page& p = page(id);
    if (p.home == Tier::host) return copy(OpKind::copy_to_device, id, home(id), to);
    const Location landing = unified_ ? to : activation_stages_.next();
    transfer(OpKind::read, p.layer, p.index, std::array{access(landing, id, AccessMode::write)});
    if (!unified_) copy(OpKind::copy_to_device, id, landing, to);
  }

  // ---- compute -----------------------------------------------------------------------------

  uint64_t flops(uint32_t layer) const {
    return forward_flops(layout_.model, layer, layout_.options.micro_batch_tokens,
                         layout_.options.sequence_len);
  }

  void plan_forward(uint32_t layer) {
    begin_layer();
    if (kind_.pending_update) plan_pending_update(layer, true);
    const Location weights = weights_for_compute(layer);
    OpId last;
    for (uint32_t mb = 0; mb < kind_.micro_batches; ++mb) {
      std::vector<Access> touched = {layer_weights(weights, layer)};
      if (layer > 0) {
        const PageId input = layout_.activation(layer, mb);
        touched.push_back(
            access(activation(input, false, now(layer, mb)), input, AccessMode::read));
      }
      const PageId output = layout_.activation(layer + 1, mb);
      touched.push_back(
          access(activation(output, true, now(layer, mb)), output, AccessMode::write));
      last = emit(OpKind::forward, Lane::compute, layer, mb, flops(layer), touched);
    }
    end_layer(last);
  }

  Location take_gradient_sum(uint32_t layer) {
    return layer == 0 && tied() ? Location{layout_.tied_gradient, 0} : gradients_.next();
  }
  Access sums(Location at, uint32_t layer, bool first) const {
    return access(at, layout_.gradient_sum[layer], first ? AccessMode::write : AccessMode::update);
  }

  void plan_head() {
    const uint32_t layer = head();
    begin_layer();
    if (kind_.pending_update) plan_pending_update(layer, true);
    const Location weights = weights_for_compute(layer);
    const Location embedding = tied() ? weights_for_compute(0) : Location{};
    const Location sum = kind_.backward ? take_gradient_sum(layer) : Location{};
    OpId last;
    for (uint32_t mb = 0; mb < kind_.micro_batches; ++mb) {
      const PageId input = layout_.activation(layer, mb),
                   gradient = layout_.activation_gradient(mb);
      std::vector<Access> touched = {
          layer_weights(weights, layer),
          access(activation(input, false, now(layer, mb)), input, AccessMode::read)};
      if (kind_.backward) {
        touched.push_back(
            access(activation(gradient, true, now(layer, mb)), gradient, AccessMode::write));
        touched.push_back(sums(sum, layer, mb == 0));
      }
      if (tied()) touched.push_back(layer_weights(embedding, 0));
      if (tied() && kind_.backward) {
        touched.push_back(sums({layout_.tied_gradient, 0}, 0, mb == 0));
      }
      last = emit(kind_.backward ? OpKind::loss : OpKind::score, Lane::compute, layer, mb,
                  (kind_.backward ? 3 : 1) * flops(layer), touched);
    }
    end_layer(last);
    if (kind_.backward) finish_gradient(layer, sum);
  }

  void plan_backward(uint32_t layer) {
    begin_layer();
    const Location weights = layer > 0 ? weights_for_compute(layer) : Location{};
    const Location sum = take_gradient_sum(layer);
    const uint32_t stage = 2 * head() - layer;
    OpId last;
    for (uint32_t mb = 0; mb < kind_.micro_batches; ++mb) {
      const PageId gradient = layout_.activation_gradient(mb);
      const bool first = mb == 0 && !(layer == 0 && tied());
      const Location at = activation(gradient, false, now(stage, mb));
      if (layer == 0) {
        last = emit(OpKind::backward, Lane::compute, 0, mb, flops(0),
                    {access(at, gradient, AccessMode::read), sums(sum, 0, first)});
        continue;
      }
      const PageId input = layout_.activation(layer, mb);
      const Location x = activation(input, false, now(stage, mb));
      mark_dirty(gradient);
      last = emit(OpKind::backward, Lane::compute, layer, mb, 3 * flops(layer),
                  {layer_weights(weights, layer), access(x, input, AccessMode::read),
                   access(at, gradient, AccessMode::update), sums(sum, layer, first)});
    }
    end_layer(last);
    finish_gradient(layer, sum);
  }

  // ---- gradients ---------------------------------------------------------------------------

  void finish_gradient(uint32_t layer, Location sum) {
    const PageId sum_page = layout_.gradient_sum[layer];
    const uint64_t padded = layout_.model.layers[layer].padded;
    emit(OpKind::reduce_gradient, Lane::compute, layer, 0, padded,
         {access(sum, sum_page, AccessMode::read)});
    for (uint32_t c = 0; c < layout_.chunk_count(layer); ++c) export_gradient(layer, c, sum);
  }

  void export_gradient(uint32_t layer, uint32_t c, Location sum) {
    const Chunk& chunk = layout_.chunk(layer, c);
    const PageId id = layout_.gradient(layer, c);
    const bool float32 = layout_.options.precision == Precision::float32;
    const Location at{sum.slot, chunk.begin * sizeof(float)};
    const Access source =
        access(at, layout_.gradient_sum[layer], AccessMode::read, chunk.parameters * sizeof(float));
    const auto cast_to = [&](Location to) {
      emit(OpKind::export_gradient, Lane::compute, layer, c, chunk.parameters,
           {source, access(to, id, AccessMode::write)});
    };
    if (updates_in_backward()) {
      if (float32 && (unified_ || updates_on_device(layer))) {
        return plan_update(layer, c, source, false);
      }
      Location gradient = unified_ ? stages_.next() : at;
      cast_to(gradient);
      if (!unified_ && !updates_on_device(layer)) {
        const Location stage = stages_.next();
        copy(OpKind::copy_to_host, id, gradient, stage);
        gradient = stage;
      }
      return plan_update(layer, c, access(gradient, id, AccessMode::read), false);
    }
    const Tier tier = page(id).home;
    if (tier != Tier::nvme && (unified_ || tier == Tier::device)) return cast_to(home(id));
    if (unified_) {
      const Location stage = stages_.next();
      cast_to(stage);
      return transfer(OpKind::write, layer, c, std::array{access(stage, id, AccessMode::read)});
    }
    cast_to(at);
    const Location target = tier == Tier::host ? home(id) : stages_.next();
    copy(OpKind::copy_to_host, id, at, target);
    if (tier == Tier::nvme) {
      transfer(OpKind::write, layer, c, std::array{access(target, id, AccessMode::read)});
    }
  }

  const Layout& layout_;
  StepKind kind_;
  bool unified_;
  Program program_;
  Hazards hazards_;
  OpId load_gate_;
  std::vector<OpId> layer_ends_;
  Pool stages_, records_, device_stages_, activation_stages_, gradients_;
  std::vector<RingEntry> ring_;
  uint64_t ring_clock_ = 0;
  bool ring_was_filled_ = false;
  Location device_landing_;
  std::vector<CacheEntry> cache_;
};

}  // namespace

Program plan_step(const Layout& layout, const StepKind& kind) {
  return StepPlanner(layout, kind).plan();
}

}  // namespace overspill
