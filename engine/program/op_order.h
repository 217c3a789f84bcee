// The order of a step's ops within a layer, and that every op the step is made of is there: a part
// of the verifier. Shares nothing with the planner.
#pragma once

#include <vector>

#include "engine/plan/layout.h"

namespace overspill {

class OpOrder {
 public:
  OpOrder(const Program& program, const Layout& layout);

  /// The next op; `sum_version` is the newest version of its layer's gradient sums.
  void check(OpId id, uint32_t sum_version);
  /// Behind the last op.
  void check_complete() const;

 private:
  uint32_t count(OpKind kind, uint32_t layer) const {
    return done_[static_cast<size_t>(kind)][layer];
  }
  bool agrees() const {
    return layout_.options.update == UpdateTiming::in_backward && layout_.options.world() > 1;
  }
  void require(bool condition, OpId id, const char* otherwise) const;
  void check_reduced(OpId id, uint32_t layer, uint32_t sum_version) const;

  const Program& program_;
  const Layout& layout_;
  std::vector<std::vector<uint32_t>> done_;  ///< ops by kind and layer
  std::vector<uint32_t> reduced_;            ///< per layer: its sums' version over the ranks
};

}  // namespace overspill
