// Seeds (the greedy choice, whole kinds on one tier, kinds filled in every order), then local
// search from the best of them: with each kind as a whole where it did well, and with all of them
// free. The best few are compared on Programs of the run's own chunks.
#include "engine/forecast/placement_search.h"

#include <algorithm>

#include "engine/base/error.h"
#include "engine/forecast/placement_climb.h"

namespace overspill {
namespace {

/// Coarse times tell thousands apart, finer ones what is worth the run's own chunks.
constexpr Grain kFine{.chunks = 1024, .micro_batches = 1024};
constexpr Grain kReal{.chunks = 32768, .micro_batches = 32768};
constexpr size_t kFinalists = 3;

/// Simulated at most, per layer: they bound the search's time.
constexpr double kFixedOps = 20'000, kFreeOps = 10'000;
/// Of the best seed's score: a kind that did worse as a whole is not kept so.
constexpr double kNear = 1.15;

class Search {
 public:
  Search(const ModelShape& model, const PlanOptions& options, const HardwareProfile& profile)
      : model_(model), options_(options), profile_(profile), climber_(model, options, profile) {}

  bool anything_open() const {
    return !climber_.groups().empty() || climber_.chooses_twice() || !options_.prefetch_depth;
  }

  PlacementChoice run(double effort) {
    seed_greedily();
    if (greedy_ && greedy_->prediction.moved == 0) return confirm();
    for (const bool twice : {false, true}) {
      if (twice && !climber_.chooses_twice()) continue;
      if (!twice) seed_whole_kinds();
      seed_fillings(twice);
      if (std::optional<Trial> best = climber_.take()) starts_.push_back(std::move(*best));
    }
    if (starts_.empty()) std::rethrow_exception(refusal_);
    climb_freely(effort);
    climb_with_whole_kinds(effort);
    return confirm();
  }

 private:
  // ---- seeds -------------------------------------------------------------------------------

  void seed_greedily() {
    const uint32_t first = options_.prefetch_depth.value_or(1);
    const uint32_t last = options_.prefetch_depth.value_or(0);
    for (uint32_t depth = first;; --depth) {
      try {
        greedy_ = climber_.greedy(depth);
        depth_ = depth;
        return;
      } catch (const Error& error) {
        if (error.code() != ErrorCode::does_not_fit) throw;
        if (depth == last) {
          refusal_ = std::current_exception();
          return;
        }
      }
    }
  }

  /// Kinds of `tiers[i]` for the i-th group of one kind; the others as the options say.
  Placed whole_kinds(size_t code, uint32_t depth) const {
    Placed placed{{}, options_.update_twice, depth};
    placed.twice.resize(model_.layers.size(), false);
    for (size_t k = 0; k < kPlacedKinds.size(); ++k) {
      const Placement asked = options_.*kPlacedKinds[k].placement;
      Tier tier = asked == Placement::nvme   ? Tier::nvme
                  : asked == Placement::host ? Tier::host
                                             : Tier::device;
      if (std::ranges::find(climber_.groups(), Kinds{k}) != climber_.groups().end()) {
        tier = kTiers[code % kTiers.size()];
        code /= kTiers.size();
      }
      (placed.homes.*kPlacedKinds[k].homes).assign(model_.layers.size(), tier);
    }
    return placed;
  }

  void seed_whole_kinds() {
    size_t codes = 1;
    for (size_t i = 0; i < climber_.single_kinds(); ++i) codes *= kTiers.size();
    for (size_t code = 0; code < codes; ++code) {
      Placed placed = whole_kinds(code, options_.prefetch_depth.value_or(1));
      if (!climber_.consider(placed) && !options_.prefetch_depth) {
        placed.depth = 0;
        climber_.consider(placed);
      }
    }
  }

  /// From everything on drives, kind after kind up to the device and the host, in every order.
  void seed_fillings(bool twice) {
    if (!options_.nvme_available) return;
    size_t all_nvme = 0;
    for (size_t i = 0; i < climber_.single_kinds(); ++i) all_nvme = all_nvme * kTiers.size() + 2;
    for (const uint32_t more : {0u, 1u}) {
      Placed placed = whole_kinds(all_nvme, options_.prefetch_depth.value_or(depth_ + more));
      if (twice) placed.twice.assign(model_.layers.size(), true);
      seed_fillings(placed, 0);
    }
  }

  /// The placement, and it with each further kind filled up, and so on; `filled`: a bit a kind.
  void seed_fillings(const Placed& placed, uint32_t filled) {
    climber_.consider(placed);
    for (size_t i = 0; i < climber_.single_kinds(); ++i) {
      if ((filled >> i & 1) == 1) continue;
      const Kinds& kinds = climber_.groups()[i];
      Placed more = placed;
      for (const Tier tier : {Tier::device, Tier::host}) {
        const Layers layers = layers_on(more, kinds, Tier::nvme);
        more = climber_.moved_until(true, more, kinds, layers, tier, Spread::even, false)
                   .value_or(more);
      }
      seed_fillings(more, filled | 1u << i);
    }
  }

  // ---- climbs ------------------------------------------------------------------------------

  void allow(double ops_of_layer) {
    climber_.allow_ops(static_cast<size_t>(ops_of_layer * static_cast<double>(layers())));
  }
  size_t layers() const { return model_.layers.size(); }

  /// What a user might set, the other kinds searched: ways out of a free climb's dead ends.
  void climb_with_whole_kinds(double effort) {
    const double best = std::ranges::min(starts_, {}, &Trial::score).score;
    std::vector<WholeKind> list = climber_.whole_kinds();
    std::erase_if(list, [=](const WholeKind& kind) { return kind.best.score > kNear * best; });
    for (WholeKind& kind : list) {
      allow(effort * kFixedOps / static_cast<double>(list.size()));
      climber_.climb(std::move(kind.best), layers() / 2, 1, kind.kind);
    }
  }

  void climb_freely(double effort) {
    allow(effort * kFreeOps);
    for (Trial& start : starts_) start = climber_.climb(std::move(start), layers() / 2, 2);
    std::ranges::sort(starts_, {}, &Trial::score);
    for (Trial& start : starts_) climber_.climb(std::move(start), 1, 1);
  }

  // ---- the end -----------------------------------------------------------------------------

  void rescore(std::vector<Trial>& list, const Grain& grain) {
    PlacementPredictor predictor(model_, options_, profile_, grain);
    for (Trial& trial : list) {
      trial.prediction = predictor.predict(trial.placed, trial.generous);
      trial.score = climber_.score(trial.prediction);
    }
    std::ranges::stable_sort(list, {}, &Trial::score);
  }

  /// The best of what the climbs reached, and the greedy one, with the run's own chunks.
  PlacementChoice confirm() {
    std::vector<Trial> finalists;
    for (const Trial& trial : climber_.reached()) {
      if (std::ranges::find(finalists, trial.placed, &Trial::placed) == finalists.end()) {
        finalists.push_back(trial);
      }
    }
    rescore(finalists, kFine);
    finalists.resize(std::min(finalists.size(), kFinalists));
    if (greedy_) finalists.push_back(*greedy_);
    rescore(finalists, kReal);
    const Trial& chosen = finalists.front();
    PlacementChoice choice{.options = options_, .searched = true};
    choice.options.homes = chosen.placed.homes;
    choice.options.update_twice = chosen.placed.twice;
    choice.options.prefetch_depth = chosen.placed.depth;
    choice.seconds = chosen.prediction.seconds;
    choice.written = chosen.prediction.written;
    choice.trials = climber_.trials();
    if (greedy_) {
      choice.greedy_seconds =
          std::ranges::find(finalists, greedy_->placed, &Trial::placed)->prediction.seconds;
    }
    return choice;
  }

  const ModelShape& model_;
  const PlanOptions& options_;
  const HardwareProfile& profile_;
  PlacementClimber climber_;
  std::optional<Trial> greedy_;
  std::exception_ptr refusal_;  ///< why the greedy one does not fit
  uint32_t depth_ = 1;          ///< of the greedy one
  std::vector<Trial> starts_;   ///< the best seeds: all layers updated once, and twice
};

}  // namespace

PlacementChoice solve_placement(const ModelShape& model, const PlanOptions& options,
                                const HardwareProfile& profile, double effort) {
  if (options.homes || effort == 0) return {.options = options};
  Search search(model, options, profile);
  return search.anything_open() ? search.run(effort) : PlacementChoice{.options = options};
}

}  // namespace overspill
