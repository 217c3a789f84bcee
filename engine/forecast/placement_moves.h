// How one placement becomes another: some layers' pages of some kinds go to another tier.
#pragma once

#include <array>
#include <span>
#include <vector>

#include "engine/forecast/placement_trial.h"

namespace overspill {

inline constexpr std::array<Tier, 3> kTiers = {Tier::device, Tier::host, Tier::nvme};

using Layers = std::vector<uint32_t>;  ///< in order
using Kinds = std::vector<size_t>;     ///< of kPlacedKinds, moved together

enum class Spread : uint8_t { even, first, last };
inline constexpr std::array<Spread, 3> kSpreads = {Spread::even, Spread::first, Spread::last};

/// `count` of the layers, at most all of them.
Layers pick(const Layers& layers, size_t count, Spread spread);

/// Some of the layers, and how others are picked that make room for them.
struct Choice {
  Layers layers;
  std::span<const Spread> spreads;
};
/// `count` of the layers in each way; several single ones where that is 1.
std::vector<Choice> choices(const Layers& layers, size_t count);

/// Layers whose pages of all of the kinds are on the tier.
Layers layers_on(const Placed& placed, const Kinds& kinds, Tier tier);

/// `twice`: whether layers that come to drives are updated twice.
Placed moved(Placed placed, const Kinds& kinds, const Layers& layers, Tier tier, bool twice);

/// One layer: its pages of a kind to a tier, or updated twice or not.
struct Change {
  uint32_t layer;
  size_t kind;  ///< of kPlacedKinds; their number for the update
  Tier tier;    ///< where the kind goes
};
/// All of a placement: of single kinds, and of the update if that is a choice.
std::vector<Change> changes(const Placed& placed, std::span<const Kinds> kinds, bool twice);
Placed changed(Placed placed, const Change& change);

}  // namespace overspill
