// Where a run's first weights come from: a checkpoint, a base model, or random numbers. Found and
// checked before anything is allocated.
#pragma once

#include <optional>

#include "engine/model/safetensors.h"
#include "engine/train/checkpoint.h"
#include "engine/train/run_setup.h"

namespace overspill {

struct RunStart {
  std::optional<Checkpoint> checkpoint;
  std::optional<ModelTensors> model;  ///< neither: random weights
};

/// Verifies the checkpoint or the base model against the run. Throws Error naming the file; refuses
/// an output_dir with checkpoints of an earlier run unless they are resumed.
RunStart find_start(const RunSetup& setup, const Ranks& ranks);

}  // namespace overspill
