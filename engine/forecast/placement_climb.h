// Local search from one placement: layers of a kind change their tier, others make room for them;
// halves of all layers first, single ones last. Every trial is simulated once.
#pragma once

#include <array>
#include <optional>
#include <span>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "engine/forecast/placement_moves.h"
#include "engine/plan/profile.h"

namespace overspill {

/// A placement and what a step of it takes.
struct Trial {
  Placed placed;
  bool generous = true;
  Prediction prediction;
  double score = 0;
};

/// The best placement with all layers of one kind on one tier.
struct WholeKind {
  size_t kind;  ///< of kPlacedKinds
  Trial best;
};

class PlacementClimber {
 public:
  PlacementClimber(const ModelShape& model, const PlanOptions& options,
                   const HardwareProfile& profile);
  PlacementClimber(const PlacementClimber&) = delete;
  PlacementClimber& operator=(const PlacementClimber&) = delete;

  /// Kinds that the options leave open, which move together: single ones first.
  const std::vector<Kinds>& groups() const { return groups_; }
  size_t single_kinds() const;
  bool chooses_twice() const { return choose_twice_; }
  uint32_t trials() const { return trials_; }
  /// The planner's choice without rates, tried; it settles whether placements must leave room for
  /// pipelining. Throws Error(does_not_fit).
  Trial greedy(uint32_t depth);

  /// Ops that may be simulated from now on.
  void allow_ops(size_t ops) { most_ops_ = ops_ + ops; }
  /// Tries a placement that has not been tried; where it is better than the one at hand, it takes
  /// its place.
  bool consider(Placed placed);
  /// The placement at hand, the best since it was taken last.
  std::optional<Trial> take() { return std::exchange(current_, std::nullopt); }
  /// Moves fewer and fewer layers, from `most` to `least` of them; `fixed`: a kind that stays.
  Trial climb(Trial start, size_t most, size_t least, std::optional<size_t> fixed = {});
  /// Where the climbs went, a trial for every size of moves.
  const std::vector<Trial>& reached() const { return reached_; }
  std::vector<WholeKind> whole_kinds() const;

  /// The extreme count in [0, layers] that fits when so many of them move to the tier: the largest,
  /// or the least.
  std::optional<Placed> moved_until(bool most, const Placed& placed, const Kinds& kinds,
                                    const Layers& layers, Tier tier, Spread spread, bool twice);
  double score(const Prediction& prediction) const;

 private:
  void find_kinds();
  bool exhausted() const { return ops_ >= most_ops_; }
  std::optional<bool> fits(const Placed& placed);
  void remember_whole_kinds(const Trial& trial);
  std::span<const bool> twice_choices(Tier to) const;
  bool consider_with_room(const Placed& placed, Tier full, const Layers& keep,
                          std::span<const Spread> spreads);
  bool move_layers(size_t count);
  bool toggle_twice(size_t count);
  bool change_depth();
  bool change_two();

  const ModelShape& model_;
  const PlanOptions& options_;
  PlacementView real_;
  PlacementPredictor coarse_;
  std::vector<char> asked_;  ///< layers to update twice without a choice of them
  std::vector<Kinds> groups_;
  bool choose_twice_ = false;
  bool roomy_ = false;  ///< placements must leave room for pipelining
  std::optional<Trial> current_;
  std::vector<Trial> reached_;
  std::array<std::array<std::optional<Trial>, 3>, kPlacedKinds.size()> whole_;  ///< by kind, tier
  std::unordered_set<std::string> seen_;
  size_t most_ops_ = SIZE_MAX, ops_ = 0;
  uint32_t trials_ = 0;
};

}  // namespace overspill
