// Plays the part of a pager and of the program that calls it, at random: brings, holds and evicts
// layers, adds up gradients in few slots, ends and skips steps, and has all of it planned by
// FragmentPlanner, as much at once as engine/pager may join. Computes nothing.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <vector>

#include "engine/plan/fragment_planner.h"
#include "engine/program/fragment_verifier.h"

namespace overspill::test {

class FragmentDriver {
 public:
  /// Sees each fragment with the verifier as it is before it; throws to stop.
  using Visit = std::function<void(const Program& program, std::span<const FragmentPart> parts,
                                   FragmentVerifier& verifier)>;
  FragmentDriver(const Layout& layout, uint64_t seed, Visit visit);

  void step();
  /// Applies what is pending.
  void flush();

 private:
  enum class Sums : uint8_t { none, slot, paged };
  struct Entry {
    SlotId slot;
    std::optional<uint32_t> layer;
    uint64_t last_use = 0;
    bool held = false, stale = false;
  };
  struct Layer {
    bool held = false, complete = false;
    uint64_t updated = 0;  ///< steps
    Sums sums = Sums::none;
    SlotId slot;
    uint32_t count = 0;
  };
  struct SumSlot {
    SlotId slot;
    std::optional<uint32_t> layer;
    uint64_t last_use = 0;
    bool busy = false;  ///< what it held is still to be finished or stored
  };

  uint32_t below(size_t n) { return static_cast<uint32_t>(random_() % n); }
  bool one_in(uint32_t n) { return below(n) == 0; }
  uint32_t layers() const { return static_cast<uint32_t>(state_.size()); }
  bool trainable(uint32_t l) const { return layout_.model.layers[l].trainable(); }
  bool in_backward() const { return layout_.options.update == UpdateTiming::in_backward; }
  bool needs_slot(uint32_t l) const;
  bool is_behind(uint32_t l) const {
    return !in_backward() && state_[l].updated != steps_ && trainable(l);
  }

  void event();
  void bring(std::vector<uint32_t> wanted, bool hold);
  void release(uint32_t l);
  Entry* find(uint32_t l);
  Entry* victim(std::span<const uint32_t> keep);
  void leave_stale(Entry& entry);
  RingPlace place_for_update(uint32_t l);
  void catch_up(uint32_t l);

  void add_gradient(uint32_t l);
  void take_slot(uint32_t l);
  void complete(uint32_t l);

  void plan(FragmentPart part);
  void run();
  void decide();

  const Layout& layout_;
  std::mt19937_64 random_;
  Visit visit_;
  FragmentVerifier verifier_;
  std::vector<Layer> state_;
  std::vector<Entry> ring_;
  std::vector<SumSlot> sum_slots_;
  uint64_t clock_ = 0, steps_ = 0;
  uint32_t contributions_ = 1;  ///< that complete a gradient

  // Of the thread that plans.
  std::unique_ptr<FragmentPlanner> fragment_;
  std::optional<bool> zero_;
  std::vector<char> pending_, moments_zero_, has_gradient_;
  std::vector<uint32_t> first_updates_;
};

}  // namespace overspill::test
