// A training step of a model whose weights stream from the host's memory to the GPU: what it is,
// and the profile that it is predicted with.
#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

#include "engine/base/units.h"
#include "engine/bench/bench_rounds.h"
#include "engine/model/layers.h"
#include "engine/plan/profile.h"

namespace overspill {

/// The default has 618 million parameters, whose state takes 9 GB of the host's memory.
struct StepCase {
  uint32_t hidden = 2048, intermediate = 8192, layers = 8;
  uint32_t heads = 32, kv_heads = 8, head_dim = 64, vocabulary = 32000;
  uint32_t tokens = 4096;  ///< of a micro-batch, in one sequence
  uint32_t micro_batches = 4;
  uint32_t steps = 5;  ///< timed, behind those that settle
  /// Updates on the host are measured on so many; chunks of 4 Mi at most.
  uint64_t update_parameters = uint64_t{32} << 20;
  uint64_t drive_bytes = kGiB;  ///< written to each drive to measure it
};

/// Where a step runs.
struct StepPlace {
  uint32_t gpu = 0;
  /// Directories on drives that hold the optimizer's state; none: the host's memory does.
  std::vector<std::filesystem::path> drives;
  RoundOptions rounds{};
  double drive_seconds = 0.5;  ///< of a point
  double seconds = 60;         ///< no step begins later
};

ModelConfig model_config(const StepCase& step);

/// Adds the rates of the step's own layers and gradients on the GPU, of updates on the host and of
/// the drives. Throws Error(not_found) without NVIDIA's libraries, Error(does_not_fit) without the
/// memory, and what run_nvme_benchmark does.
void measure_step_rates(const StepCase& step, const StepPlace& place, const BenchProgress& progress,
                        HardwareProfile& profile);

}  // namespace overspill
