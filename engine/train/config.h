// The run's configuration: Axolotl's key names where they exist, and one `offload:` section.
// Pure data; relative paths are resolved against the file's directory.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/collective/ranks.h"
#include "engine/plan/layout.h"
#include "engine/plan/profile.h"
#include "engine/train/parameter_groups.h"
#include "engine/train/token_data.h"
#include "nvme/async_io.h"
#include "optim/lr_schedule.h"

namespace overspill {

/// What computes: a GPU, or the host as one, whose memory is the host's or apart from it.
enum class DeviceMode : uint8_t { automatic, unified, discrete, cuda };
/// Where optimizer updates run: where their state lives, or on one side, where it then must live.
enum class OptimizerDevice : uint8_t { automatic, cpu, gpu };
/// Which of nvme_paths a run stripes over: all, or those on the NUMA node of its CPUs.
enum class StripeOver : uint8_t { all, local };

struct DatasetConfig {
  std::filesystem::path path;
  TokenFormat type = TokenFormat::automatic;
  bool evaluation = false;  ///< `split: validation`
};

struct OffloadConfig {
  std::optional<uint64_t> device_memory;  ///< bytes; default: a third of the machine's memory
  std::optional<uint64_t> host_memory;    ///< bytes; default: a third of the machine's memory
  std::optional<uint64_t> nvme_capacity;  ///< bytes; default: what the run needs
  std::vector<std::filesystem::path> nvme_paths;
  StripeOver stripe = StripeOver::all;
  /// Stripes of each path in turn; default: measured when much state is on NVMe, else one each.
  std::optional<std::vector<uint32_t>> nvme_shares;
  bool allow_raw_devices = false;
  Placement weights = Placement::automatic;
  Placement optimizer = Placement::automatic;
  Placement gradients = Placement::automatic;
  Placement activations = Placement::automatic;
  std::optional<uint32_t> prefetch_depth;    ///< layers loaded ahead; default 1
  std::optional<uint64_t> chunk_parameters;  ///< default: a 32nd of a block, 1 Mi to 4 Mi
  std::optional<uint32_t> record_slots;      ///< host slots of optimizer pages; default: by depth
  std::optional<uint32_t> stage_slots;       ///< host slots of weights and gradients; the same
  UpdateTiming update = UpdateTiming::next_forward;
  /// `update: twice` or `next_forward`: all layers that can be, or none; empty: by prediction.
  std::optional<bool> update_twice{};
  DeviceMode device = DeviceMode::automatic;  ///< automatic: a GPU where there is one, else unified
  OptimizerDevice optimizer_device = OptimizerDevice::automatic;
  IoOptions io;
  /// What `overspill bench nvme --profile` measured; rates of predictions, defaults of `io`.
  std::optional<HardwareProfile> hardware_profile;
};

enum class CollectiveBackend : uint8_t { automatic, gloo, nccl };

/// `train_batch_size`: sequences of one optimizer step over all ranks.
struct GlobalBatch {
  uint64_t sequences = 0;
  std::string where;                  ///< the place it was given at
  bool derives_accumulation = false;  ///< else gradient_accumulation_steps was given
  bool derives_micro_batch = false;   ///< else micro_batch_size was given, or is the default
};

struct TrainConfig {
  std::filesystem::path base_model;         ///< HF directory; empty when from scratch
  std::filesystem::path base_model_config;  ///< config.json or directory; default base_model
  bool init_from_scratch = false;
  std::vector<DatasetConfig> datasets;
  uint32_t eval_steps = 0;       ///< 0: only at the end, when there is evaluation data
  uint32_t eval_sequences = 64;  ///< `eval_max_sequences`: most sequences per evaluation
  uint32_t sequence_len = 0;
  uint32_t micro_batch_size = 1;
  uint32_t gradient_accumulation_steps = 1;
  std::optional<GlobalBatch> global_batch;  ///< what resolve_batch has yet to settle
  std::optional<uint64_t> max_steps;
  double num_epochs = 1;
  Precision precision = Precision::bf16;
  OptimizerKind optimizer = OptimizerKind::adamw;
  StateFormat optimizer_state = StateFormat::float32;
  double learning_rate = 0;
  LrScheduler lr_scheduler = LrScheduler::cosine;
  std::optional<uint64_t> warmup_steps;
  std::optional<double> warmup_ratio;
  /// Regular expressions of the tensors that train; absent: all of them.
  std::optional<std::vector<std::string>> unfrozen_parameters;
  std::vector<LrGroup> lr_groups;  ///< tensors with a peak rate of their own
  double weight_decay = 0.0;
  double adam_beta1 = 0.9;
  double adam_beta2 = 0.999;
  double adam_epsilon = 1e-8;
  double sgd_momentum = 0.9;
  double adafactor_decay = 0.8;
  double max_grad_norm = 1.0;         ///< 0: no clipping
  uint32_t max_non_finite_steps = 3;  ///< stop after this many skipped updates in a row
  uint64_t seed = 42;
  uint32_t zero_stage = 3;  ///< with several ranks: what they share instead of copying
  /// 0: all ranks share one copy of the state; n: groups of n do; kGroupIsHost: those of a host.
  uint32_t hybrid_shard = 0;
  std::optional<ReduceType> reduce_dtype;  ///< default: by precision
  CollectiveBackend collective_backend = CollectiveBackend::automatic;
  bool deterministic_reduction =
      false;                 ///< gradients are summed in rank order, whatever the backend
  double rank_timeout = 60;  ///< seconds
  bool shuffle = true;
  std::filesystem::path output_dir;
  uint64_t save_steps = 0;        ///< 0: only at the end
  uint32_t save_total_limit = 0;  ///< 0: keep all
  bool save_only_model = false;
  uint32_t logging_steps = 1;
  std::string resume_from_checkpoint;  ///< "", "true" or a path (resolved)
  OffloadConfig offload;
  /// What was set, "key: value" a line, without paths of this host: ranks compare it.
  std::string fingerprint;
};

/// The update rule of a configuration.
OptimizerSettings optimizer_settings(const TrainConfig& config);

/// Parses a YAML file and applies `--set key=value` overrides (dots name nested keys:
/// `offload.host_memory=1GiB`). Throws Error(invalid_config) with file:line, key, what is wrong and
/// the cure: unknown key (nearest known named), wrong type, out of range, missing, contradictory.
/// The settings of a DeepSpeed configuration named by `deepspeed` hold where the file has none; it
/// logs what became of each of its keys.
TrainConfig load_train_config(const std::filesystem::path& path,
                              const std::vector<std::string>& overrides = {});

/// Settles `train_batch_size` = micro_batch_size * gradient_accumulation_steps * ranks: derives the
/// factor that was not given, and throws Error(invalid_config) with the product where no whole
/// number fits. Does nothing without `train_batch_size`.
void resolve_batch(TrainConfig& config, uint32_t ranks);

/// As load_train_config, for planning: what does not matter there may be missing, and sequence_len
/// is 4096 by default. A Hugging Face config.json (or a directory with one) is a configuration of
/// that model from scratch with all defaults. There, and with `has_drives`, the hardware's drives
/// are meant where nvme_paths are not set.
TrainConfig load_plan_config(const std::filesystem::path& path,
                             const std::vector<std::string>& overrides, bool has_drives);

/// The same for a program that computes its own layers, from text: only keys of state and its
/// updates; relative paths start at the current directory.
TrainConfig parse_state_config(const std::string& text);

/// The file's text with `key=value` settings in their places, under a line of comment; its own
/// comments are not kept. The file must be one that load_train_config accepts.
std::string config_with_settings(const std::filesystem::path& path,
                                 std::span<const std::string> settings, const std::string& comment);

/// Every key with its sentence, what it accepts and its default, for `overspill train --help-keys`.
std::string describe_train_keys();

}  // namespace overspill
