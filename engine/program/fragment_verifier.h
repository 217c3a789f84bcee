// An independent check of fragments: Programs of pieces of steps whose layers another program
// computes. What memory holds between them is known from those before, so that what a fragment
// counts on is checked as well. Shares nothing with the planner.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "engine/plan/layout.h"
#include "engine/program/contents.h"
#include "engine/program/fragment.h"
#include "engine/program/program.h"

namespace overspill {

/// Follows one layout's fragments in the order in which they run. A copy goes on by itself.
///
/// What the computing program does between fragments follows from the parts: it has filled the sums
/// that are finished or stored, and it reads the places of the ring that no part names.
class FragmentVerifier {
 public:
  /// All weights and state are at home; no sums, no gradients, nothing in the ring.
  explicit FragmentVerifier(const Layout& layout);

  /// The fragment runs next. Throws Error(internal) naming the op or the layer when its Program
  /// breaks a rule, or when its parts ask for what cannot be; use a copy from before to go on then.
  /// - Dependencies, reach, races and budgets: as in verify_program.
  /// - An op that reads a page finds it there, whole and newest; it touches places of the ring and
  ///   sums that parts have given to its layer, stages, and homes of what trains.
  /// - A part's layer was in a state for it: a pending update, sums in this slot, sums in pages. No
  ///   gradient is replaced before its update has used it.
  /// - Each chunk that this rank trains is updated once where an update was asked for, by the
  ///   gradient that was finished, and else not; its gradient leaves complete sums once.
  /// - Collectives are those of the parts, in their order: ranks with the same parts meet.
  /// - Sums are reduced over the ranks before they are used or stored, and gathers are behind this
  ///   rank's updates.
  /// - At the end weights and state are at home in their newest version, and so are gradients that
  ///   were finished and sums that were stored; loaded sums are in their slot; a layer that was
  ///   brought is whole in its place, with all ranks' newest weights.
  void verify(const Program& program, std::span<const FragmentPart> parts);

  /// A step has ended: by layer, whether an update by its gradient is pending.
  void end_step(const std::vector<char>& pending);

  /// Weights, state and the ring were replaced from outside; no update is pending, and no gradient
  /// has begun.
  void forget();

 private:
  enum class Use : uint8_t { none, home, ring, sums, passage };
  enum class Sums : uint8_t { none, slot, paged };
  /// What is known of a layer between fragments.
  struct LayerState {
    Sums sums = Sums::none;
    SlotId sums_slot;
    bool complete = false;  ///< its gradient's pages are those of the step under way
    bool pending = false;   ///< its update has yet to be applied
    uint32_t reduced = 0;   ///< its sums' version over the ranks
  };
  /// A layer's part in the fragment under way.
  struct Work {
    bool updates = false, finishes = false, stores = false, loads = false;
    uint32_t reduce_gradient = 0, all_reduce = 0, agree = 0;
  };
  /// What a place of the ring holds at the end.
  struct Placed {
    uint32_t layer;
    bool old;  ///< it was brought before its update, which leaves it what it is or changes it
  };
  struct Collected {
    OpKind kind;
    uint32_t layer;
  };

  // ---- parts (fragment_verifier.cpp) ----

  void begin_part(const FragmentPart& part);
  void begin_update(const FragmentPart& part);
  void give_place(const FragmentPart& part);
  void take_sums(const FragmentPart& part);
  void expect_collectives(const FragmentPart& part);
  /// Where the part leaves its layer's weights in the ring.
  void expect_ring(const FragmentPart& part);
  void check_end();
  void check_weights(uint32_t layer, const Work& work) const;
  void check_gradient(uint32_t layer, const Work& work);
  void check_ring(SlotId slot, Placed placed) const;

  // ---- ops (fragment_ops.cpp) ----

  void require(bool condition, OpId id, const char* otherwise) const;
  void check_op(OpId id);
  void check_order(OpId id, const Op& op);
  void check_copy(OpId id, const Op& op) const;
  void check_export(OpId id, const Op& op);
  void check_update(OpId id, const Op& op);
  void check_gather(OpId id, const Op& op);
  void check_access(OpId id, const Op& op, const Access& access, Contents::Value& moved);
  void check_page(OpId id, const Op& op, const Access& access, PageId page) const;
  void check_place(OpId id, const Op& op, const Access& access) const;
  void check_home(OpId id, const Op& op, const Contents::Range& range) const;
  /// What an access of a page skips of it, and how many bytes it covers.
  std::pair<uint64_t, uint64_t> part_of(const Op& op, const Access& access, PageId id) const;
  Contents::Value newest(OpId id, Contents::Value found) const;
  Contents::Value find(OpId id, const Op& op, const Contents::Range& range) const;
  void write(OpId id, const Contents::Range& range, Contents::Value value);
  Contents::Value made(OpId id, const Op& op, PageId page, Contents::Value moved);
  uint32_t gathered(const Op& op, PageId id);
  void age_peer_weights(uint32_t layer);

  // ---- both ----

  bool in_backward() const { return layout_.options.update == UpdateTiming::in_backward; }
  bool agrees() const { return in_backward() && layout_.options.world() > 1; }
  /// Whether the fragment's update of the layer has begun, for all ranks.
  bool begun(const Work& work) const { return work.updates && (!agrees() || work.agree > 0); }
  /// Whether this rank updates the chunk.
  bool trains_here(uint32_t layer, uint32_t c) const {
    return trains_[layer][c] != 0 && layout_.owns(layout_.chunk(layer, c));
  }
  PageId sum_of(uint32_t layer) const { return layout_.gradient_sum[layer]; }
  /// Of a gradient's page: those that mean something once the gradient is complete.
  uint64_t gradient_bytes(PageId page) const;
  /// Where the page is, or the part of the sums that it may hold instead.
  Contents::Range range_of(SlotId slot, uint64_t offset, PageId page) const;
  Contents::Range sums_range(SlotId slot, uint64_t offset, PageId page) const;

  const Layout& layout_;
  Contents contents_;
  std::vector<Use> uses_;                  ///< by slot
  std::vector<std::vector<char>> trains_;  ///< by layer and chunk
  std::vector<uint32_t> newest_;           ///< by page
  std::vector<LayerState> layers_;

  // Of the fragment under way.
  const Program* program_ = nullptr;
  std::map<uint32_t, Work> work_;                  ///< by layer
  std::set<std::pair<uint32_t, uint32_t>> given_;  ///< slots of the ring and of sums, and layers
  std::map<uint32_t, Placed> ring_;                ///< by slot
  std::vector<Collected> collectives_;
  size_t collected_ = 0;
  std::vector<uint32_t> updated_, exported_;  ///< times, by page; of layers with parts
};

}  // namespace overspill
