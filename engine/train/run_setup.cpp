// Planning a run.
#include "engine/train/run_setup.h"

#include <unistd.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "engine/base/error.h"
#include "engine/base/fd.h"
#include "engine/base/log.h"
#include "engine/base/units.h"
#include "engine/forecast/placement_search.h"
#include "offload/drive_locality.h"
#include "offload/rank_placement.h"

namespace overspill {
namespace {

uint64_t third_of_memory() {
  return static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) *
         static_cast<uint64_t>(sysconf(_SC_PAGE_SIZE)) / 3;
}

std::filesystem::path config_path(const TrainConfig& config) {
  return config.base_model_config.empty() ? config.base_model : config.base_model_config;
}

/// With `stripe: local`, keeps the paths whose drives are on the NUMA node of this process's CPUs.
TrainConfig with_chosen_drives(TrainConfig config) {
  OffloadConfig& offload = config.offload;
  if (offload.stripe == StripeOver::all || offload.nvme_paths.empty()) return config;
  std::vector<std::string> drives;
  for (const std::filesystem::path& path : offload.nvme_paths) drives.push_back(drive_of(path));
  const Machine machine = read_machine();
  const int node = node_of_cpus(machine, allowed_cpus());
  const std::vector<size_t> near = drives_on_node(drives, machine, node);
  if (near.empty()) {
    log_warning(
        "offload.stripe: local: {}; all of nvme_paths are used. Bind the process to one node with "
        "drives (numactl --cpunodebind) to change that",
        node < 0 ? std::string("this process's CPUs are on several NUMA nodes")
                 : fmt::format("no drive of nvme_paths is known to be on NUMA node {}", node));
    return config;
  }
  OffloadConfig chosen = offload;
  chosen.nvme_paths.clear();
  if (chosen.nvme_shares) chosen.nvme_shares->clear();
  std::string names;
  for (const size_t i : near) {
    chosen.nvme_paths.push_back(offload.nvme_paths[i]);
    if (chosen.nvme_shares) chosen.nvme_shares->push_back((*offload.nvme_shares)[i]);
    names += " " + offload.nvme_paths[i].string();
  }
  log_info("offload.stripe: local: NUMA node {} has{}", node, names);
  offload = std::move(chosen);
  return config;
}

/// Ranks of a host share directories, each with files of its own, but divide block devices.
TrainConfig with_own_devices(TrainConfig config, const RankIdentity& rank) {
  OffloadConfig& offload = config.offload;
  const auto is_device = [](const std::filesystem::path& path) {
    return std::filesystem::is_block_file(path);
  };
  const auto devices = std::ranges::count_if(offload.nvme_paths, is_device);
  if (rank.local_ranks == 1 || devices == 0) return config;
  std::vector<std::filesystem::path> paths;
  std::vector<uint32_t> shares;
  uint32_t seen = 0;
  for (size_t i = 0; i < offload.nvme_paths.size(); ++i) {
    const bool other =
        is_device(offload.nvme_paths[i]) && seen++ % rank.local_ranks != rank.local_rank;
    if (other) continue;
    paths.push_back(offload.nvme_paths[i]);
    if (offload.nvme_shares) shares.push_back((*offload.nvme_shares)[i]);
  }
  if (devices < rank.local_ranks) {
    fail(ErrorCode::invalid_config,
         "offload.nvme_paths: {} block device{} for the {} ranks of this host, which cannot share "
         "one; name as many devices as ranks, or directories on file systems",
         devices, devices == 1 ? "" : "s", rank.local_ranks);
  }
  offload.nvme_paths = std::move(paths);
  if (offload.nvme_shares) offload.nvme_shares = std::move(shares);
  return config;
}

/// A rank's part of the host's CPUs; none where it is not to be bound.
std::vector<uint32_t> own_cpus(const RankIdentity& rank) {
  const std::vector<uint32_t> allowed = allowed_cpus();
  const Machine machine = read_machine();
  const bool bound_by_launcher = std::ssize(allowed) < sysconf(_SC_NPROCESSORS_ONLN);
  if (bound_by_launcher || !machine.is_this_system) return {};
  if (allowed.size() < rank.local_ranks) {
    if (rank.local_rank == 0) {
      log_warning("{} ranks share the {} CPUs of this host: they take turns", rank.local_ranks,
                  allowed.size());
    }
    return {};
  }
  std::vector<uint32_t> cpus;
  const RankPlacement placement =
      plan_ranks(machine, {.ranks = rank.local_ranks, .allowed = allowed, .drives = {}});
  for (const PlacedCores& cores : placement.ranks[rank.local_rank].cores) {
    for (const auto* some : {&cores.cpus.compute, &cores.cpus.io, &cores.cpus.idle}) {
      cpus.insert(cpus.end(), some->begin(), some->end());
    }
  }
  return cpus;
}

/// Plans once: the machine does not change. HWLOC_XMLFILE's has other CPUs than this one.
const CpuPlan& process_cpus() {
  static const CpuPlan plan = [] {
    const Machine machine = read_machine();
    return machine.is_this_system ? plan_cpus(machine, {.allowed = allowed_cpus()}) : CpuPlan{};
  }();
  if (!parallel_groups_chosen()) set_parallel_groups(parallel_groups_of(plan));
  return plan;
}

}  // namespace

/// The ranks that share one copy of the state.
uint32_t shard_group(const TrainConfig& config, const RankIdentity& rank) {
  const uint32_t wish = config.hybrid_shard;
  return shard_group_size(config.zero_stage, wish == kGroupIsHost ? rank.local_ranks : wish,
                          rank.ranks);
}

CpuBinding bind_rank(const RankIdentity& rank) {
  return CpuBinding(rank.local_ranks == 1 ? std::vector<uint32_t>() : own_cpus(rank));
}

ModelShape trained_model(const TrainConfig& config) {
  ModelShape model = llama_layers(load_model_config(config_path(config)));
  apply_parameter_groups(model, config.unfrozen_parameters, config.lr_groups);
  return model;
}

Ranks::Options ranks_options(const TrainConfig& config, const RankIdentity& rank) {
  if (config.collective_backend == CollectiveBackend::nccl) {
    fail(ErrorCode::invalid_config,
         "collective_backend: nccl moves data between GPUs, and this run's device is the host; set "
         "it to gloo or auto");
  }
  return {.shard_group = shard_group(config, rank),
          .timeout = config.rank_timeout,
          .config = config.fingerprint};
}

/// What a configuration shares of the state, and among which ranks.
void share_state(const TrainConfig& config, const RankIdentity& rank, PlanOptions& o) {
  const uint32_t group = shard_group(config, rank);
  o.ranks = group;
  o.rank = rank.rank % group;
  o.replicas = rank.ranks / group;
  o.replica = rank.rank / group;
  o.shard_weights = config.zero_stage == 3;
  o.reduce_type = config.reduce_dtype.value_or(
      config.precision == Precision::bf16 ? ReduceType::bf16 : ReduceType::float32);
}

PlanOptions plan_options(const TrainConfig& config, const BatchShape& batch, const Llama& llama,
                         const RankIdentity& rank) {
  const OffloadConfig& offload = config.offload;
  PlanOptions o;
  share_state(config, rank, o);
  o.precision = config.precision;
  o.micro_batches = config.gradient_accumulation_steps;
  o.micro_batch_tokens = batch.tokens();
  o.sequence_len = batch.sequence_len;
  o.compute_scratch_bytes = llama.scratch_bytes();
  o.unified = offload.device == DeviceMode::unified;
  o.device_memory = offload.device_memory.value_or(third_of_memory() / rank.local_ranks);
  o.host_memory = offload.host_memory.value_or(third_of_memory() / rank.local_ranks);
  o.nvme_capacity = offload.nvme_capacity.value_or(UINT64_MAX);
  o.nvme_available = !offload.nvme_paths.empty();
  o.nvme_files = static_cast<uint32_t>(std::max<size_t>(1, offload.nvme_paths.size()));
  o.nvme_stripe_bytes = offload.io.block_size;
  o.nvme_shares = offload.nvme_shares.value_or(std::vector<uint32_t>{});
  o.weights = offload.weights;
  o.optimizer = offload.optimizer;
  o.gradients = offload.gradients;
  o.activations = offload.activations;
  o.prefetch_depth = offload.prefetch_depth;
  o.chunk_parameters = offload.chunk_parameters;
  o.record_slots = offload.record_slots;
  o.stage_slots = offload.stage_slots;
  o.update = offload.update;
  if (offload.update_twice) {
    o.update_twice.assign(llama.model().layers.size(), *offload.update_twice);
  }
  o.optimizer_settings = optimizer_settings(config);
  return o;
}

/// What the configuration leaves open, solved for its profile's rates or the defaults.
PlanOptions solved_options(const TrainConfig& config, const PlanOptions& options,
                           const ModelShape& model) {
  const HardwareProfile rates = config.offload.hardware_profile.value_or(HardwareProfile{});
  const PlacementChoice choice = solve_placement(model, options, rates);
  log_info("{}", describe(choice));
  return choice.options;
}

/// The ranks gather a layer's weights in step with each other, so that they load equally far ahead.
Layout plan_alike(const TrainConfig& config, PlanOptions options, const ModelShape& model,
                  const Ranks& ranks) {
  Layout layout = plan_layout(model, solved_options(config, options, model));
  const std::vector<uint32_t> depths = ranks.gather(layout.prefetch_depth);
  const uint32_t least = *std::ranges::min_element(depths);
  if (std::ranges::count(depths, least) == std::ssize(depths)) return layout;
  options.prefetch_depth = least;
  return plan_layout(model, solved_options(config, options, model));
}

RunSetup::RunSetup(const TrainConfig& c, const Ranks& ranks)
    : config(with_own_devices(with_chosen_drives(c), ranks.identity())),
      cpus(process_cpus()),
      model(trained_model(c)),
      batch{c.micro_batch_size, c.sequence_len},
      llama(model, weight_type(), batch, host_kernels()),
      layout(
          plan_alike(config, plan_options(config, batch, llama, ranks.identity()), model, ranks)) {
  if (config.offload.update_twice.value_or(false) && layout.layers_updated_twice().empty()) {
    log_warning(
        "offload.update: twice: no layer has both its weights and its optimizer state on NVMe; all "
        "are updated once, as with next_forward");
  }
  if (c.sequence_len > model.config.max_position_embeddings) {
    log_warning("sequence_len {} is above the model's max_position_embeddings {}", c.sequence_len,
                model.config.max_position_embeddings);
  }
}

std::filesystem::path RunSetup::model_path() const { return config_path(config); }

LaneCpus RunSetup::lane_cpus() const {
  LaneCpus lanes;
  if (!cpus.pinned) return lanes;
  lanes.fill(cpus.all_cpus());
  for (const Lane lane : {Lane::nvme_read, Lane::nvme_write}) {
    lanes[static_cast<size_t>(lane)] = cpus.io_cpus();
  }
  for (const Lane lane : {Lane::compute, Lane::optimizer}) {
    lanes[static_cast<size_t>(lane)] = cpus.compute_cpus();
  }
  return lanes;
}

bool has_byte_tokenizer(const std::filesystem::path& model_path) {
  const auto directory =
      std::filesystem::is_directory(model_path) ? model_path : model_path.parent_path();
  const auto path = directory / "tokenizer_config.json";
  if (!std::filesystem::exists(path)) return false;
  const nlohmann::json json = nlohmann::json::parse(read_text_file(path), nullptr, false);
  return json.is_object() && json.value("tokenizer_class", "") == "ByT5Tokenizer";
}

SequenceData open_sequences(const RunSetup& setup, bool evaluation) {
  std::vector<std::unique_ptr<TokenFile>> files;
  for (const DatasetConfig& dataset : setup.config.datasets) {
    if (dataset.evaluation != evaluation) continue;
    files.push_back(open_token_file({.path = dataset.path,
                                     .format = dataset.type,
                                     .vocab_size = setup.model.config.vocab_size,
                                     .byte_tokenizer = has_byte_tokenizer(setup.model_path())}));
  }
  return SequenceData(std::move(files), {.sequence_len = setup.config.sequence_len,
                                         .shuffle = setup.config.shuffle && !evaluation,
                                         .seed = setup.config.seed});
}

}  // namespace overspill
