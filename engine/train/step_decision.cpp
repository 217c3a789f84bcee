// Clipping as PyTorch's clip_grad_norm_ does it.
#include "engine/train/step_decision.h"

#include <algorithm>
#include <cmath>

namespace overspill {

StepDecision decide_step(double squares, bool non_finite, double limit, double loss_scale) {
  StepDecision decision;
  decision.finite = !non_finite && std::isfinite(squares);
  decision.grad_norm = std::sqrt(squares) / loss_scale;
  if (limit > 0) decision.clip_factor = std::min(1.0, limit / (decision.grad_norm + 1e-6));
  return decision;
}

void advance_moments(const PageStore& store, const UpdateStep& update, Collective& shard,
                     std::span<const char> layers) {
  const FactoredMoments moments = store.factored_moments();
  if (moments.sums == nullptr) return;
  const Layout& layout = store.layout();
  shard.all_reduce(std::span(moments.sums, layout.table.factored_elements));
  for (uint32_t layer = 0; layer < layout.model.layers.size(); ++layer) {
    if (!layers.empty() && layers[layer] == 0) continue;
    for (const FactoredMatrix& matrix : layout.matrices(layer)) {
      advance_moment(moments, matrix, update);
    }
  }
}

}  // namespace overspill
