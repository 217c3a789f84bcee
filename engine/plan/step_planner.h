// The planner's state while it emits one step: what is in which slot, and the scoreboard. Internal
// to engine/plan; its parts are planner.cpp (the schedule), step_updates.cpp (weights and optimizer
// updates) and step_activations.cpp (working copies of activations).
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "engine/base/error.h"
#include "engine/plan/hazards.h"
#include "engine/plan/layout.h"

namespace overspill {

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

/// Plans one step; used once.
class StepPlanner {
 public:
  StepPlanner(const Layout& layout, const StepKind& kind)
      : layout_(layout),
        kind_(kind),
        unified_(layout.options.unified),
        lowest_(kind.backward ? layout.model.lowest_trainable() : 0),
        hazards_(layout.slots.size(), layout.pages.size()),
        stages_(layout.stages),
        records_(layout.records),
        device_stages_(layout.device_stages),
        activation_stages_(layout.activation_stages),
        gradients_(layout.gradient_ring) {
    program_.kind = kind;
    for (const SlotId slot : layout.weight_ring) ring_.push_back({slot, kNobody, 0, false});
    for (const SlotId slot : layout.activation_slots) cache_.push_back({slot, PageId{}, false});
  }

  Program plan();

 private:
  friend class FragmentPlanner;
  static constexpr uint32_t kNobody = UINT32_MAX;
  struct RingEntry {
    SlotId slot;
    uint32_t layer;
    uint64_t last_use;
    bool gathered;  ///< the other ranks' parts are there as well
  };
  struct CacheEntry {
    SlotId slot;
    PageId page;
    bool dirty;
  };

  uint32_t head() const { return layout_.model.head(); }
  bool trainable(uint32_t layer) const { return layout_.model.layers[layer].trainable(); }
  /// ZeRO-3: the other ranks' weights are fetched before each use.
  bool gathers_weights() const { return layout_.options.gathers_weights(); }
  bool gathers_updates(uint32_t layer) const { return layout_.gathers_updates(layer); }
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
    const uint64_t bytes = layout_.whole(layer) * layout_.options.weight_bytes();
    return {at.slot,
            at.offset,
            bytes,
            layout_.first_whole_weight[layer],
            layout_.whole_weight_count(layer),
            AccessMode::read};
  }

  OpId emit(OpKind kind, Lane lane, uint32_t layer, uint32_t index, uint64_t work,
            std::initializer_list<Access> accesses);
  OpId emit(OpKind kind, Lane lane, uint32_t layer, uint32_t index, uint64_t work,
            std::span<const Access> accesses);

  /// One NVMe op over several pages; their slots' accesses are all writes or all reads.
  void transfer(OpKind kind, uint32_t layer, uint32_t index, std::span<const Access> accesses);
  void copy(OpKind kind, PageId id, Location from, Location to);

  // ---- pacing ------------------------------------------------------------------------------

  /// Loads for the next layer may start when the layer prefetch_depth + 1 before it has finished.
  void begin_layer() {
    const size_t back = layout_.prefetch_depth + size_t{1};
    load_gate_ = layer_ends_.size() >= back ? layer_ends_[layer_ends_.size() - back] : OpId{};
  }
  void end_layer(OpId last_compute) { layer_ends_.push_back(last_compute); }

  // ---- weights -----------------------------------------------------------------------------

  /// Whether kernels can address the layer's weights at home: this rank's part of them.
  bool addresses_home(uint32_t layer) const;
  RingEntry* find_ring(uint32_t layer);
  /// The ring slot that computed least recently, now for the layer; the caller fills it.
  RingEntry& take_ring(uint32_t layer);
  /// The ring slot that holds the layer, else one for it.
  RingEntry& find_or_take_ring(uint32_t layer);
  Location in_ring(const RingEntry& entry, uint32_t layer, uint32_t c) const;

  /// The layer's weights where kernels can read them, loaded when they are not there yet.
  Location weights_for_compute(uint32_t layer);
  void load_weight(uint32_t layer, uint32_t c, const RingEntry& entry);
  /// The other ranks' parts join this rank's, which is in the ring or comes from its home.
  void gather_weights(uint32_t layer, RingEntry& entry);
  /// The same in one place, which holds this rank's part already.
  void gather_in_place(uint32_t layer, Location whole);

  // ---- updates -----------------------------------------------------------------------------

  /// How the updates of a layer's chunks take part in the step.
  struct UpdatePass {
    bool for_compute = false;  ///< new weights go where compute reads them
    bool writes = true;        ///< new weights and state go to NVMe
    bool repeated = false;     ///< the other ranks' new weights are home already
    bool aside = false;        ///< weights pass through a stage; the ring is left as it is
    bool in_ring = false;      ///< the ring holds the weights to update
  };
  /// Whether this step updates the layer in the forward and again in the backward.
  bool twice(uint32_t layer) const {
    return kind_.forward && kind_.backward && kind_.pending_update && layout_.updates_twice(layer);
  }

  /// Where the update finds a chunk's weights, and whether they must be fetched there first.
  struct UpdateWeights {
    Location at;
    bool fetch = false;
  };
  UpdateWeights locate_weights(uint32_t layer, uint32_t c, const UpdatePass& pass);

  /// Where the update finds a chunk's gradient (already in a slot when updating in the backward).
  Location fetch_gradient(uint32_t layer, uint32_t c, std::vector<Access>& reads);

  /// AdamW on one chunk and the way back home. `gradient` is where it lies, when it is not at home;
  /// its page is the gradient's, or the sums' (float32 in place).
  void plan_update(uint32_t layer, uint32_t c, std::optional<Access> gradient,
                   const UpdatePass& pass);

  /// Starts fetching weights for an update: an NVMe segment, or a copy.
  void fetch_weights(uint32_t layer, uint32_t c, Location at, std::vector<Access>& reads);
  void finish_fetch(uint32_t layer, uint32_t c, const UpdateWeights& weights);

  void write_back(uint32_t layer, uint32_t c, const UpdateWeights& weights, Location state,
                  const UpdatePass& pass);

  /// The other ranks' new weights come here and go home, once this rank's are in their place.
  void share_update(uint32_t layer, bool was_in_ring);
  void write_peer_weights(uint32_t layer, const RingEntry& entry);
  /// The pending update of all chunks of a layer.
  void plan_pending_update(uint32_t layer, const UpdatePass& pass);
  /// The forward's update once more, from the same state and gradient, and written.
  void plan_repeated_update(uint32_t layer, bool for_compute);
  void plan_flush(uint32_t layer);

  // ---- activations -------------------------------------------------------------------------

  /// Position of the current op in the step's compute order; pages' next uses follow from it.
  uint64_t now(uint32_t stage, uint32_t mb) const;
  /// When the page is used next, from `now` on; UINT64_MAX for never.
  uint64_t next_use(const Page& p, uint64_t now) const;

  Location activation(PageId id, bool fresh, uint64_t now);
  void mark_dirty(PageId id);
  void spill_activation(PageId id, Location from);
  void load_activation(PageId id, Location to);

  // ---- compute -----------------------------------------------------------------------------

  uint64_t flops(uint32_t layer) const;
  uint64_t backward_flops(uint32_t layer) const;

  void plan_forward(uint32_t layer);

  Location take_gradient_sum(uint32_t layer);
  Access sums(Location at, uint32_t layer, bool first) const;

  void plan_head();

  void plan_backward(uint32_t layer);

  // ---- gradients ---------------------------------------------------------------------------

  /// What follows a layer's backward is emitted behind the loads of the next layer, so that these
  /// do not queue behind it in their lanes.
  struct Unfinished {
    uint32_t layer;
    Location sum;
  };
  void finish_layer();
  void finish_gradient(uint32_t layer, Location sum);
  /// A layer's sums become those of the ranks that share this copy of the state, as far as this
  /// rank owns them.
  void reduce_in_group(uint32_t layer, Location sum);
  /// The same of all ranks.
  void reduce_over_ranks(uint32_t layer, Location sum);

  /// A chunk's gradient goes home, or into its update right away.
  void export_gradient(uint32_t layer, uint32_t c, Location sum, const UpdatePass& pass);

  const Layout& layout_;
  StepKind kind_;
  bool unified_;
  uint32_t lowest_;  ///< the last layer of the backward: all below it are frozen
  Program program_;
  Hazards hazards_;
  OpId load_gate_;
  std::vector<OpId> layer_ends_;
  Pool stages_, records_, device_stages_, activation_stages_, gradients_;
  std::vector<RingEntry> ring_;
  uint64_t ring_clock_ = 0;
  Location device_landing_;
  std::optional<Unfinished> unfinished_;
  std::vector<CacheEntry> cache_;
};

}  // namespace overspill
