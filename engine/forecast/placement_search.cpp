// Seeds (the greedy choice, whole kinds on one tier, kinds filled in every order), then local
// search from the best: layers of a kind change their tier, others make room for them; halves of
// all layers first, single ones last. The best few are compared on finer Programs.
#include "engine/forecast/placement_search.h"

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "engine/base/error.h"
#include "engine/base/units.h"
#include "engine/forecast/placement_moves.h"

namespace overspill {
namespace {

constexpr Grain kCoarse{.chunks = 128, .micro_batches = 256};
constexpr Grain kFine{.chunks = 1024, .micro_batches = 1024};
constexpr double kOpsOfLayer = 40'000;  // simulated at most: bounds the search's time
constexpr double kImprovement = 5e-5;   // of a score that is worth a change
constexpr size_t kMostChanges = 100;    // whose pairs are all tried
constexpr uint32_t kDeepest = 2;

struct Trial {
  Placed placed;
  bool generous = true;
  Prediction prediction;
  double score = 0;
};

class Search {
 public:
  Search(const ModelShape& model, const PlanOptions& options, const HardwareProfile& profile)
      : model_(model),
        options_(options),
        profile_(profile),
        real_(model, options, choose_chunk_parameters(model, options)),
        coarse_(model, options, profile, kCoarse),
        asked_(options.update_twice) {
    asked_.resize(model.layers.size(), false);
    find_kinds();
    choose_twice_ = options.update == UpdateTiming::next_forward && options.update_twice.empty();
  }

  bool anything_open() const {
    return !groups_.empty() || choose_twice_ || !options_.prefetch_depth;
  }

  PlacementChoice run(double effort) {
    seed_greedily();
    if (!refusal_ && current_->prediction.moved == 0) return confirm();
    std::vector<Trial> starts;
    for (const bool twice : {false, true}) {
      if (twice && !choose_twice_) continue;
      if (!twice) seed_whole_kinds();
      seed_fillings(twice);
      if (current_) starts.push_back(*std::exchange(current_, std::nullopt));
    }
    if (starts.empty()) std::rethrow_exception(refusal_);
    most_ops_ =
        static_cast<size_t>(effort * kOpsOfLayer * static_cast<double>(model_.layers.size()));
    for (Trial& start : starts) climb(start, model_.layers.size() / 2, 2);
    std::ranges::sort(starts, {}, &Trial::score);
    for (Trial& start : starts) climb(start, 1, 1);
    return confirm();
  }

 private:
  void find_kinds() {
    Kinds state;
    for (size_t k = 0; k < kPlacedKinds.size(); ++k) {
      const PlacedKind& kind = kPlacedKinds[k];
      const bool gradients = kind.homes == &Homes::gradients;
      if (options_.*kind.placement != Placement::automatic) continue;
      if (gradients && options_.update == UpdateTiming::in_backward) continue;
      groups_.push_back({k});
      if (kind.homes != &Homes::activations) state.push_back(k);
    }
    if (state.size() > 1) groups_.push_back(state);
  }

  double score(const Prediction& prediction) const {
    const double traffic = kWriteWeight * static_cast<double>(prediction.written) +
                           kReadWeight * static_cast<double>(prediction.read);
    return prediction.seconds * (1 + traffic / real_.state_bytes());
  }

  bool exhausted() const { return ops_ >= most_ops_; }

  /// With the least slots only where nothing better is at hand: coarse ops flatter those.
  std::optional<bool> fits(const Placed& placed) {
    const std::optional<bool> generous = real_.fits(placed);
    return generous && !*generous && roomy_ ? std::nullopt : generous;
  }

  /// Tries a placement that has not been tried; where it is better than the one at hand, it takes
  /// its place.
  bool consider(Placed placed) {
    if (exhausted()) return false;
    if (choose_twice_) {
      real_.drop_useless(placed);
    } else {
      placed.twice = asked_;
    }
    if (!seen_.insert(key(placed)).second) return false;
    const std::optional<bool> generous = fits(placed);
    if (!generous) return false;
    Trial trial{std::move(placed), *generous, {}, 0};
    trial.prediction = coarse_.predict(trial.placed, trial.generous);
    trial.score = score(trial.prediction);
    ops_ += trial.prediction.ops;
    ++trials_;
    if (current_ && trial.score >= current_->score * (1 - kImprovement)) return false;
    current_ = std::move(trial);
    return true;
  }

  static std::string key(const Placed& placed) {
    std::string text(1, static_cast<char>(placed.depth));
    for (const PlacedKind& kind : kPlacedKinds) {
      for (const Tier tier : placed.homes.*kind.homes) text += static_cast<char>(tier);
    }
    return text.append(placed.twice.begin(), placed.twice.end());
  }

  // ---- moves -------------------------------------------------------------------------------

  /// The extreme count in [0, layers] that fits when so many of them move to the tier: the largest,
  /// or the least.
  std::optional<Placed> moved_until(bool most, const Placed& placed, const Kinds& kinds,
                                    const Layers& layers, Tier tier, Spread spread, bool twice) {
    const auto with = [&](size_t count) {
      return moved(placed, kinds, pick(layers, count, spread), tier, twice);
    };
    size_t fitting = most ? 0 : layers.size(), other = most ? layers.size() + 1 : 0;
    if (!fits(with(fitting))) return std::nullopt;
    while ((most ? other - fitting : fitting - other) > 1) {
      const size_t middle = (fitting + other) / 2;
      (fits(with(middle)) ? fitting : other) = middle;
    }
    return with(fitting);
  }

  std::span<const bool> twice_choices(Tier to) const {
    static constexpr std::array<bool, 2> kBoth = {false, true};
    return std::span(kBoth).first(choose_twice_ && to == Tier::nvme ? 2 : 1);
  }

  /// Tries a placement; where it does not fit, with others off the tier that it fills.
  bool consider_with_room(const Placed& placed, Tier full, const Layers& keep,
                          std::span<const Spread> spreads) {
    if (fits(placed)) return consider(placed);
    bool improved = false;
    for (const Kinds& kinds : groups_) {
      Layers layers = layers_on(placed, kinds, full);
      std::erase_if(layers, [&](uint32_t l) { return std::ranges::binary_search(keep, l); });
      if (layers.empty()) continue;
      for (const Tier to : kTiers) {
        if (to == full) continue;
        for (const bool twice : twice_choices(to)) {
          for (const Spread spread : spreads) {
            const auto fitting = moved_until(false, placed, kinds, layers, to, spread, twice);
            if (!fitting) break;
            improved |= consider(*fitting);
          }
        }
      }
    }
    return improved;
  }

  bool move_layers(size_t count) {
    bool improved = false;
    for (const Kinds& kinds : groups_) {
      for (const Tier from : kTiers) {
        for (const Tier to : kTiers) {
          if (from == to) continue;
          const Placed base = current_->placed;
          const Layers layers = layers_on(base, kinds, from);
          if (layers.empty()) continue;
          for (const auto& [picked, spreads] : choices(layers, count)) {
            for (const bool twice : twice_choices(to)) {
              improved |=
                  consider_with_room(moved(base, kinds, picked, to, twice), to, picked, spreads);
            }
          }
        }
      }
    }
    return improved;
  }

  bool toggle_twice(size_t count) {
    bool improved = false;
    for (const bool twice : {true, false}) {
      const Placed base = current_->placed;
      Layers layers;
      for (uint32_t l = 0; l < base.twice.size(); ++l) {
        if (static_cast<bool>(base.twice[l]) != twice) layers.push_back(l);
      }
      if (layers.empty()) continue;
      for (const auto& [picked, spreads] : choices(layers, count)) {
        Placed changed = base;
        for (const uint32_t l : picked) changed.twice[l] = twice;
        improved |= consider_with_room(changed, Tier::host, {}, spreads);
      }
    }
    return improved;
  }

  bool change_depth() {
    bool improved = false;
    for (uint32_t depth = 0; depth <= kDeepest; ++depth) {
      Placed changed = current_->placed;
      if (changed.depth == depth) continue;
      changed.depth = depth;
      improved |= consider_with_room(changed, Tier::device, {}, kSpreads);
      improved |= consider_with_room(changed, Tier::host, {}, kSpreads);
    }
    return improved;
  }

  /// Any two changes at once, in models small enough to try them all.
  bool change_two() {
    const std::vector<Change> list = changes(current_->placed, groups_, choose_twice_);
    if (list.size() > kMostChanges) return false;
    bool improved = false;
    for (size_t i = 0; i < list.size(); ++i) {
      for (size_t j = 0; j < i; ++j) {
        improved |= consider(changed(changed(current_->placed, list[i]), list[j]));
      }
    }
    return improved;
  }

  /// With moves of fewer and fewer layers.
  void climb(Trial& start, size_t most, size_t least) {
    current_ = std::move(start);
    for (size_t count = most; count >= least; count /= 4) {
      for (bool improved = true; improved && !exhausted();) {
        improved = choose_twice_ && toggle_twice(count);
        improved |= move_layers(count);
        if (!options_.prefetch_depth) improved |= change_depth();
        if (count == 1) improved |= change_two();
      }
      finalists_.push_back(*current_);
    }
    start = *current_;
  }

  // ---- seeds -------------------------------------------------------------------------------

  void seed_greedily() {
    const uint32_t first = options_.prefetch_depth.value_or(1);
    const uint32_t last = options_.prefetch_depth.value_or(0);
    for (uint32_t depth = first;; --depth) {
      try {
        Placed placed = real_.greedy(depth);
        placed.twice = asked_;
        consider(std::move(placed));
        depth_ = depth;
        roomy_ = current_->generous && coarse_.is_coarse();
        finalists_.push_back(*current_);
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
    Placed placed{{}, asked_, depth};
    for (size_t k = 0; k < kPlacedKinds.size(); ++k) {
      const Placement asked = options_.*kPlacedKinds[k].placement;
      Tier tier = asked == Placement::nvme   ? Tier::nvme
                  : asked == Placement::host ? Tier::host
                                             : Tier::device;
      if (std::ranges::find(groups_, Kinds{k}) != groups_.end()) {
        tier = kTiers[code % kTiers.size()];
        code /= kTiers.size();
      }
      (placed.homes.*kPlacedKinds[k].homes).assign(model_.layers.size(), tier);
    }
    return placed;
  }

  size_t single_kinds() const {
    return static_cast<size_t>(
        std::ranges::count_if(groups_, [](const Kinds& kinds) { return kinds.size() == 1; }));
  }

  void seed_whole_kinds() {
    size_t codes = 1;
    for (size_t i = 0; i < single_kinds(); ++i) codes *= kTiers.size();
    for (size_t code = 0; code < codes; ++code) {
      Placed placed = whole_kinds(code, options_.prefetch_depth.value_or(1));
      if (!consider(placed) && !options_.prefetch_depth) {
        placed.depth = 0;
        consider(placed);
      }
    }
  }

  /// From everything on drives, kind after kind up to the device and the host, in every order.
  void seed_fillings(bool twice) {
    if (!options_.nvme_available) return;
    size_t all_nvme = 0;
    for (size_t i = 0; i < single_kinds(); ++i) all_nvme = all_nvme * kTiers.size() + 2;
    for (const uint32_t more : {0u, 1u}) {
      Placed placed = whole_kinds(all_nvme, options_.prefetch_depth.value_or(depth_ + more));
      if (twice) placed.twice.assign(model_.layers.size(), true);
      seed_fillings(placed, 0);
    }
  }

  /// The placement, and it with each further kind filled up, and so on; `filled`: a bit a kind.
  void seed_fillings(const Placed& placed, uint32_t filled) {
    consider(placed);
    for (size_t i = 0; i < single_kinds(); ++i) {
      if ((filled >> i & 1) == 1) continue;
      Placed more = placed;
      for (const Tier tier : {Tier::device, Tier::host}) {
        const Layers layers = layers_on(more, groups_[i], Tier::nvme);
        more =
            moved_until(true, more, groups_[i], layers, tier, Spread::even, false).value_or(more);
      }
      seed_fillings(more, filled | 1u << i);
    }
  }

  // ---- the end -----------------------------------------------------------------------------

  /// The best of what was best on the way, on finer Programs.
  PlacementChoice confirm() {
    PlacementPredictor fine(model_, options_, profile_, kFine);
    const Trial* chosen = nullptr;
    for (Trial& trial : finalists_) {
      trial.prediction = fine.predict(trial.placed, trial.generous);
      trial.score = score(trial.prediction);
      if (chosen == nullptr || trial.score < chosen->score) chosen = &trial;
    }
    PlacementChoice choice{.options = options_, .searched = true};
    choice.options.homes = chosen->placed.homes;
    choice.options.update_twice = chosen->placed.twice;
    choice.options.prefetch_depth = chosen->placed.depth;
    choice.seconds = chosen->prediction.seconds;
    choice.written = chosen->prediction.written;
    if (!refusal_) choice.greedy_seconds = finalists_.front().prediction.seconds;
    choice.trials = trials_;
    return choice;
  }

  const ModelShape& model_;
  const PlanOptions& options_;
  const HardwareProfile& profile_;
  PlacementView real_;
  PlacementPredictor coarse_;
  std::vector<char> asked_;    ///< layers to update twice without a choice of them
  std::vector<Kinds> groups_;  ///< what moves together: single kinds first
  bool choose_twice_ = false;
  std::optional<Trial> current_;  ///< the best since the last start
  std::vector<Trial> finalists_;  ///< the greedy one first, where that fits
  std::exception_ptr refusal_;    ///< why the greedy one does not fit
  std::unordered_set<std::string> seen_;
  uint32_t depth_ = 1;  ///< of the greedy one
  bool roomy_ = false;  ///< placements must leave room for pipelining
  size_t most_ops_ = SIZE_MAX, ops_ = 0;
  uint32_t trials_ = 0;
};

}  // namespace

PlacementChoice solve_placement(const ModelShape& model, const PlanOptions& options,
                                const HardwareProfile& profile, double effort) {
  if (options.homes || effort == 0) return {.options = options};
  Search search(model, options, profile);
  return search.anything_open() ? search.run(effort) : PlacementChoice{.options = options};
}

}  // namespace overspill
