// A chosen placement as a line of a run's log.
#include <fmt/format.h>

#include <algorithm>

#include "engine/base/units.h"
#include "engine/forecast/placement_moves.h"
#include "engine/forecast/placement_search.h"

namespace overspill {
namespace {

std::string counts(const std::vector<Tier>& homes) {
  std::string text;
  for (const Tier tier : kTiers) {
    const auto count = std::ranges::count(homes, tier);
    if (count == 0) continue;
    text += fmt::format("{}{} {}", text.empty() ? "" : " + ", count, tier_name(tier));
  }
  return text;
}

}  // namespace

std::string describe(const PlacementChoice& choice) {
  const PlanOptions& o = choice.options;
  if (!choice.searched) return "placement as configured";
  std::string text = "placement by layers:";
  for (const PlacedKind& kind : kPlacedKinds) {
    text += fmt::format(" {} {},", kind.key, counts(*o.homes.*kind.homes));
  }
  text += fmt::format(" updated twice {}, prefetch_depth {}; predicted {} a step",
                      std::ranges::count(o.update_twice, true), *o.prefetch_depth,
                      format_seconds(choice.seconds));
  const double gain = choice.greedy_seconds / choice.seconds - 1;
  if (gain > 0.001) text += fmt::format(", greedily {:.1f} % longer", 100 * gain);
  return text;
}

}  // namespace overspill
