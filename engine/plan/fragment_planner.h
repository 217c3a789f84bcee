// Plans pieces of a step whose layers another program computes: bringing a layer's weights to where
// they are read (behind its pending update), and what becomes of its gradient sums. A piece's
// Program runs to its end before the next one starts; what the ring holds between them is the
// caller's to know.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "engine/plan/layout.h"
#include "engine/program/fragment.h"
#include "engine/program/program.h"

namespace overspill {

class StepPlanner;

/// One Program; used once.
class FragmentPlanner {
 public:
  /// With moments_zero, every layer that is updated is so for the first time.
  FragmentPlanner(const Layout& layout, bool moments_zero);
  ~FragmentPlanner();

  /// The layer's weights become readable, with `update` behind its pending update. What is present
  /// is not fetched again.
  void bring(uint32_t layer, RingPlace place, bool update);
  /// The pending update alone.
  void update(uint32_t layer, RingPlace place);
  /// Complete sums are reduced and go to their pages or, with in_backward, into the update.
  void finish_gradient(uint32_t layer, SlotId sums, RingPlace place);
  /// Incomplete sums go to their pages, and come back.
  void store_sums(uint32_t layer, SlotId sums);
  void load_sums(uint32_t layer, SlotId sums);

  bool empty() const;
  Program take();
  /// What was planned, for FragmentVerifier.
  std::span<const FragmentPart> parts() const { return parts_; }

 private:
  void place_ring(uint32_t layer, RingPlace place);

  const Layout& layout_;
  std::unique_ptr<StepPlanner> steps_;
  std::vector<FragmentPart> parts_;
};

}  // namespace overspill
