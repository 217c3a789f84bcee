// From a configuration to everything that is decided before memory is allocated: the model's shape,
// the budgets, the layout, the number of steps. `--dump-program` stops here.
#pragma once

#include <memory>
#include <optional>

#include "engine/collective/ranks.h"
#include "engine/model/model.h"
#include "engine/model/state_math.h"
#include "engine/plan/layout.h"
#include "engine/run/executor.h"
#include "engine/train/config.h"
#include "offload/cpu_plan.h"

namespace overspill {

/// What plans ask of the device that computes.
struct ComputeNeeds {
  uint64_t scratch_bytes = 0;
  uint32_t activation_bytes = 4;
  bool unified = true;
  bool streams = false;        ///< a GPU
  uint64_t device_memory = 0;  ///< budgets in bytes, where the configuration has none
  uint64_t host_memory = 0;
};

struct RunSetup {
  TrainConfig config;  ///< offload.device is decided
  CpuPlan cpus;        ///< of this process; without nodes when the machine described is another one
  ModelShape model;
  BatchShape batch;
  std::optional<uint32_t> gpu;       ///< the device; else the host
  std::unique_ptr<Model> layers;     ///< what it computes; attached by the trainer,
  std::unique_ptr<StateMath> state;  ///< with its scratch behind that of the layers
  Layout layout;

  /// Chooses the parallel groups of the process unless they are chosen. All ranks call it at once,
  /// and plan alike.
  explicit RunSetup(const TrainConfig& config, const Ranks& ranks = Ranks());
  DType weight_type() const {
    return config.precision == Precision::bf16 ? DType::bf16 : DType::f32;
  }
  std::filesystem::path model_path() const;
  LaneCpus lane_cpus() const;
  /// Of both.
  uint64_t scratch_bytes() const { return layers->scratch_bytes() + state->scratch_bytes(); }
};

/// The shape that a configuration trains, its frozen tensors and groups marked.
ModelShape trained_model(const TrainConfig& config);

/// With `stripe: local`, keeps the paths whose drives are on the NUMA node of this process's CPUs.
TrainConfig with_chosen_drives(TrainConfig config);

/// Budgets, homes and the sharing of state between ranks: what plans depend on beside what the
/// layers compute. Without budgets in the configuration, the host as a device has a third of this
/// machine's memory for each, which the ranks of a host share; a GPU half of what it has free, and
/// the host the whole of its part.
PlanOptions state_options(const TrainConfig& config, const RankIdentity& rank,
                          std::optional<uint32_t> gpu = {}, uint64_t scratch_bytes = 0);

/// Of the GPU, else of the host.
std::unique_ptr<StateMath> make_state_math(const ModelShape& model, std::optional<uint32_t> gpu);

PageStore::Options store_options(const OffloadConfig& offload, std::optional<uint32_t> gpu);

/// What the planner is asked for, for one of the ranks.
PlanOptions plan_options(const TrainConfig& config, const ModelShape& model,
                         const BatchShape& batch, const ComputeNeeds& needs,
                         const RankIdentity& rank);
/// Of the host, by kernels on so many of its threads. The budgets are a third of this machine's
/// memory each, which the ranks of a host share.
ComputeNeeds host_needs(const TrainConfig& config, const ModelShape& model, const BatchShape& batch,
                        uint32_t threads, const RankIdentity& rank);

/// True when the model directory's tokenizer is the byte tokenizer (ByT5's): text needs no tool.
bool has_byte_tokenizer(const std::filesystem::path& model_path);

/// Opens the training (or evaluation) datasets.
SequenceData open_sequences(const RunSetup& setup, bool evaluation);

}  // namespace overspill
