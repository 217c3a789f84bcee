// One placement on paper: whether it fits with the run's own chunks and slots, and how long a step
// of it takes, predicted from a Program of fewer and larger ops.
#pragma once

#include <vector>

#include "engine/plan/cost_model.h"
#include "engine/plan/placement.h"

namespace overspill {

/// What the search chooses: homes, the layers updated twice, how far loads run ahead.
struct Placed {
  Homes homes;
  std::vector<char> twice;  ///< by layer
  uint32_t depth = 1;
  bool operator==(const Placed&) const = default;
};

struct Prediction {
  double seconds = 0;    ///< of a steady step
  uint64_t written = 0;  ///< bytes to drives, by this rank
  uint64_t read = 0;     ///< bytes from drives
  uint64_t moved = 0;    ///< bytes that any lane transfers
  size_t ops = 0;        ///< of the Program it comes from: what the prediction cost
};

/// The planner's view of a model with chunks of some size, for one placement after the other.
class PlacementView {
 public:
  PlacementView(const ModelShape& model, const PlanOptions& options, uint64_t chunk_parameters);
  PlacementView(const PlacementView&) = delete;
  PlacementView& operator=(const PlacementView&) = delete;

  /// The problem of placing with the placement's depth and layers updated twice.
  PlacementProblem& problem_of(const Placed& placed);
  /// The planner's choice without rates. Throws Error(does_not_fit).
  Placed greedy(uint32_t depth);
  /// With room for pipelining or only with the least slots; nothing where not even that fits.
  std::optional<bool> fits(const Placed& placed);
  /// Updates once the layers that homes or the model keep from being updated twice.
  void drop_useless(Placed& placed);
  /// Bytes of this rank's weights, optimizer state and gradients.
  double state_bytes() const;

 private:
  PlanOptions options_;
  ChunkTable table_;
  PlacementProblem problem_;
};

/// How fine the Programs are that predictions come from.
struct Grain {
  uint64_t chunks;         ///< of all layers together, at least two each
  uint64_t micro_batches;  ///< through all layers, at least two each
};

class PlacementPredictor {
 public:
  PlacementPredictor(const ModelShape& model, const PlanOptions& options,
                     const HardwareProfile& profile, const Grain& grain);

  /// Whether its Programs are of larger ops than the run's.
  bool is_coarse() const { return coarseness_ > 1; }
  /// `generous`: with room for pipelining (PlacementView::fits).
  Prediction predict(const Placed& placed, bool generous);

 private:
  uint32_t micro_batches_;
  double coarseness_;  ///< chunks that one of the coarse Program stands for
  PlacementView view_;
  double merged_;  ///< micro-batches that one of the coarse Program stands for
  CostModel costs_;
};

}  // namespace overspill
