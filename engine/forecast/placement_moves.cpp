// Moves between placements; whether they fit and gain is the search's business.
#include "engine/forecast/placement_moves.h"

#include <algorithm>

namespace overspill {

Layers pick(const Layers& layers, size_t count, Spread spread) {
  count = std::min(count, layers.size());
  Layers picked;
  for (size_t i = 0; i < count; ++i) {
    const size_t at = spread == Spread::first  ? i
                      : spread == Spread::last ? layers.size() - count + i
                                               : (2 * i + 1) * layers.size() / (2 * count);
    picked.push_back(layers[at]);
  }
  return picked;
}

std::vector<Choice> choices(const Layers& layers, size_t count) {
  constexpr size_t kSingles = 8;
  std::vector<Choice> list;
  if (count == 1) {
    for (const uint32_t l : pick(layers, kSingles, Spread::even)) list.push_back({{l}, kSpreads});
    return list;
  }
  for (const Spread& spread : kSpreads) {
    list.push_back({pick(layers, count, spread), std::span(&spread, 1)});
  }
  return list;
}

Layers layers_on(const Placed& placed, const Kinds& kinds, Tier tier) {
  Layers layers;
  for (uint32_t l = 0; l < placed.twice.size(); ++l) {
    const auto on_tier = [&](size_t k) { return (placed.homes.*kPlacedKinds[k].homes)[l] == tier; };
    if (std::ranges::all_of(kinds, on_tier)) layers.push_back(l);
  }
  return layers;
}

Placed moved(Placed placed, const Kinds& kinds, const Layers& layers, Tier tier, bool twice) {
  for (const uint32_t l : layers) {
    for (const size_t k : kinds) (placed.homes.*kPlacedKinds[k].homes)[l] = tier;
    if (tier == Tier::nvme) placed.twice[l] = twice;
  }
  return placed;
}

std::vector<Change> changes(const Placed& placed, std::span<const Kinds> kinds, bool twice) {
  std::vector<Change> list;
  for (uint32_t l = 0; l < placed.twice.size(); ++l) {
    for (const Kinds& kind : kinds) {
      for (const Tier tier : kTiers) {
        if (kind.size() == 1) list.push_back({l, kind.front(), tier});
      }
    }
    if (twice) list.push_back({l, kPlacedKinds.size(), Tier::nvme});
  }
  return list;
}

Placed changed(Placed placed, const Change& change) {
  if (change.kind == kPlacedKinds.size()) {
    placed.twice[change.layer] = !placed.twice[change.layer];
  } else {
    (placed.homes.*kPlacedKinds[change.kind].homes)[change.layer] = change.tier;
  }
  return placed;
}

}  // namespace overspill
