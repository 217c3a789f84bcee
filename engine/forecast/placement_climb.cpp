// Trials are simulated from coarse Programs, budgets are checked with the run's own chunks.
#include "engine/forecast/placement_climb.h"

#include <algorithm>

#include "engine/forecast/placement_search.h"

namespace overspill {
namespace {

constexpr Grain kCoarse{.chunks = 128, .micro_batches = 256};
constexpr double kImprovement = 5e-5;  // of a score that is worth a change
constexpr size_t kMostChanges = 100;   // whose pairs are all tried
constexpr uint32_t kDeepest = 2;

std::string key(const Placed& placed) {
  std::string text(1, static_cast<char>(placed.depth));
  for (const PlacedKind& kind : kPlacedKinds) {
    for (const Tier tier : placed.homes.*kind.homes) text += static_cast<char>(tier);
  }
  return text.append(placed.twice.begin(), placed.twice.end());
}

}  // namespace

PlacementClimber::PlacementClimber(const ModelShape& model, const PlanOptions& options,
                                   const HardwareProfile& profile)
    : model_(model),
      options_(options),
      real_(model, options, choose_chunk_parameters(model, options)),
      coarse_(model, options, profile, kCoarse),
      asked_(options.update_twice) {
  asked_.resize(model.layers.size(), false);
  find_kinds();
  choose_twice_ = options.update == UpdateTiming::next_forward && options.update_twice.empty();
}

void PlacementClimber::find_kinds() {
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

size_t PlacementClimber::single_kinds() const {
  return static_cast<size_t>(
      std::ranges::count_if(groups_, [](const Kinds& kinds) { return kinds.size() == 1; }));
}

Trial PlacementClimber::greedy(uint32_t depth) {
  Placed placed = real_.greedy(depth);
  placed.twice = asked_;
  consider(std::move(placed));
  roomy_ = current_->generous && coarse_.is_coarse();
  return *current_;
}

double PlacementClimber::score(const Prediction& prediction) const {
  const double traffic = kWriteWeight * static_cast<double>(prediction.written) +
                         kReadWeight * static_cast<double>(prediction.read);
  return prediction.seconds * (1 + traffic / real_.state_bytes());
}

/// With the least slots only where nothing better is at hand: coarse ops flatter those.
std::optional<bool> PlacementClimber::fits(const Placed& placed) {
  const std::optional<bool> generous = real_.fits(placed);
  return generous && !*generous && roomy_ ? std::nullopt : generous;
}

bool PlacementClimber::consider(Placed placed) {
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
  remember_whole_kinds(trial);
  if (current_ && trial.score >= current_->score * (1 - kImprovement)) return false;
  current_ = std::move(trial);
  return true;
}

void PlacementClimber::remember_whole_kinds(const Trial& trial) {
  for (size_t k = 0; k < kPlacedKinds.size(); ++k) {
    const std::vector<Tier>& homes = trial.placed.homes.*kPlacedKinds[k].homes;
    const Tier tier = homes.front();
    if (std::ranges::count(homes, tier) != std::ssize(homes)) continue;
    std::optional<Trial>& best = whole_[k][static_cast<size_t>(tier)];
    if (!best || trial.score < best->score) best = trial;
  }
}

std::vector<WholeKind> PlacementClimber::whole_kinds() const {
  std::vector<WholeKind> list;
  for (const Kinds& kinds : groups_) {
    if (kinds.size() > 1) continue;
    for (const std::optional<Trial>& best : whole_[kinds.front()]) {
      if (best) list.push_back({kinds.front(), *best});
    }
  }
  return list;
}

// ---- moves -------------------------------------------------------------------------------------

std::optional<Placed> PlacementClimber::moved_until(bool most, const Placed& placed,
                                                    const Kinds& kinds, const Layers& layers,
                                                    Tier tier, Spread spread, bool twice) {
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

std::span<const bool> PlacementClimber::twice_choices(Tier to) const {
  static constexpr std::array<bool, 2> kBoth = {false, true};
  return std::span(kBoth).first(choose_twice_ && to == Tier::nvme ? 2 : 1);
}

/// Tries a placement; where it does not fit, with others off the tier that it fills.
bool PlacementClimber::consider_with_room(const Placed& placed, Tier full, const Layers& keep,
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

bool PlacementClimber::move_layers(size_t count) {
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

bool PlacementClimber::toggle_twice(size_t count) {
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

bool PlacementClimber::change_depth() {
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
bool PlacementClimber::change_two() {
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

Trial PlacementClimber::climb(Trial start, size_t most, size_t least, std::optional<size_t> fixed) {
  const std::vector<Kinds> all = groups_;
  if (fixed) {
    std::erase(groups_, Kinds{*fixed});
    for (Kinds& kinds : groups_) std::erase(kinds, *fixed);
  }
  current_ = std::move(start);
  for (size_t count = most; count >= least; count /= 4) {
    for (bool improved = true; improved && !exhausted();) {
      improved = choose_twice_ && toggle_twice(count);
      improved |= move_layers(count);
      if (!options_.prefetch_depth) improved |= change_depth();
      if (count == 1) improved |= change_two();
    }
    reached_.push_back(*current_);
  }
  groups_ = all;
  return *take();
}

}  // namespace overspill
