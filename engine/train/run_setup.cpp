// Planning a run.
#include "engine/train/run_setup.h"

#include <unistd.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "engine/base/error.h"
#include "engine/base/fd.h"
#include "engine/base/log.h"
#include "engine/base/parallel.h"
#include "engine/base/units.h"
#include "engine/forecast/placement_search.h"
#include "engine/model/cuda_model.h"
#include "engine/model/host_state_math.h"
#include "engine/model/llama.h"
#include "engine/train/plan_request.h"
#include "engine/train/rank_setup.h"
#include "offload/cuda_device.h"
#include "offload/drive_locality.h"
#include "offload/topology.h"

namespace overspill {
namespace {

/// Of a GPU's memory, where another program computes there as well.
constexpr double kProgramsPart = 0.5;

/// Its container's part, where that is limited.
uint64_t machine_memory() {
  const uint64_t installed = static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) *
                             static_cast<uint64_t>(sysconf(_SC_PAGE_SIZE));
  return std::min(installed, container_memory_bytes());
}

DType weight_type_of(const TrainConfig& config) {
  return config.precision == Precision::bf16 ? DType::bf16 : DType::f32;
}

std::filesystem::path config_path(const TrainConfig& config) {
  return config.base_model_config.empty() ? config.base_model : config.base_model_config;
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

ModelShape trained_model(const TrainConfig& config) {
  ModelShape model = llama_layers(load_model_config(config_path(config)));
  apply_parameter_groups(model, config.unfrozen_parameters, config.lr_groups);
  return model;
}

namespace {

/// Updates run where the state lives, so choosing the side chooses the tier.
Placement optimizer_placement(const OffloadConfig& offload) {
  const Placement given = offload.optimizer;
  const OptimizerDevice side = offload.optimizer_device;
  const bool on_device = given == Placement::device;
  if (side == OptimizerDevice::automatic || given == Placement::automatic) {
    return side == OptimizerDevice::gpu ? Placement::device : given;
  }
  if (on_device != (side == OptimizerDevice::gpu)) {
    fail(ErrorCode::invalid_config,
         "offload.optimizer_device: {} updates {}, but offload.optimizer: {} keeps it {}; remove "
         "one of them",
         on_device ? "cpu" : "gpu",
         on_device ? "on the host, where the state then must be"
                   : "on the GPU, whose memory it needs",
         on_device                  ? "device"
         : given == Placement::host ? "host"
                                    : "nvme",
         on_device ? "on the GPU" : "off it");
  }
  return given;
}

}  // namespace

ComputeNeeds host_needs(const TrainConfig& config, const ModelShape& model, const BatchShape& batch,
                        uint32_t threads, const RankIdentity& rank) {
  const uint64_t third = machine_memory() / 3 / rank.local_ranks;
  const Llama llama(model, weight_type_of(config), batch, host_kernels());
  return {.scratch_bytes = llama.scratch_bytes(threads),
          .unified = config.offload.device != DeviceMode::discrete,
          .device_memory = third,
          .host_memory = third};
}

namespace {

PlanOptions planner_options(const TrainConfig& config, const ComputeNeeds& needs,
                            const RankIdentity& rank) {
  const OffloadConfig& offload = config.offload;
  PlanOptions o;
  o.precision = config.precision;
  o.micro_batches = config.gradient_accumulation_steps;
  o.compute_scratch_bytes = needs.scratch_bytes;
  o.activation_bytes = needs.activation_bytes;
  o.unified = needs.unified;
  o.streams = needs.streams;
  o.device_memory = offload.device_memory.value_or(needs.device_memory);
  o.host_memory = offload.host_memory.value_or(needs.host_memory);
  share_state(config, rank, o);
  o.nvme_capacity = offload.nvme_capacity.value_or(UINT64_MAX);
  o.nvme_available = !offload.nvme_paths.empty();
  o.nvme_files = static_cast<uint32_t>(std::max<size_t>(1, offload.nvme_paths.size()));
  o.nvme_stripe_bytes = offload.io.block_size;
  o.nvme_shares = offload.nvme_shares.value_or(std::vector<uint32_t>{});
  o.weights = offload.weights;
  o.optimizer = optimizer_placement(offload);
  o.updates_on_host = offload.optimizer_device == OptimizerDevice::cpu;
  o.gradients = offload.gradients;
  o.activations = offload.activations;
  o.prefetch_depth = offload.prefetch_depth;
  o.chunk_parameters = offload.chunk_parameters;
  o.record_slots = offload.record_slots;
  o.stage_slots = offload.stage_slots;
  o.update = offload.update;
  o.optimizer_settings = optimizer_settings(config);
  return o;
}

}  // namespace

std::unique_ptr<StateMath> make_state_math(const ModelShape& model, std::optional<uint32_t> gpu) {
  if (gpu) return make_cuda_state_math(model);
  return std::make_unique<HostStateMath>(model, host_kernels());
}

PageStore::Options store_options(const OffloadConfig& offload, std::optional<uint32_t> gpu) {
  return {.nvme_paths = offload.nvme_paths,
          .io = offload.io,
          .nvme_shares = offload.nvme_shares,
          .allow_raw_devices = offload.allow_raw_devices,
          .gpu = gpu};
}

PlanOptions state_options(const TrainConfig& config, const RankIdentity& rank,
                          std::optional<uint32_t> gpu, uint64_t scratch_bytes) {
  if (gpu) {
    const uint64_t host = machine_memory() / rank.local_ranks;
    return planner_options(config,
                           {.scratch_bytes = scratch_bytes + gpu_staging_bytes(config, rank),
                            .unified = false,
                            .streams = true,
                            .device_memory = part_of_memory(gpu_memory(*gpu).free, kProgramsPart),
                            .host_memory = part_of_memory(host, kHostPart)},
                           rank);
  }
  const uint64_t third = machine_memory() / 3 / rank.local_ranks;
  return planner_options(config,
                         {.unified = config.offload.device != DeviceMode::discrete,
                          .device_memory = third,
                          .host_memory = third},
                         rank);
}

PlanOptions plan_options(const TrainConfig& config, const ModelShape& model,
                         const BatchShape& batch, const ComputeNeeds& needs,
                         const RankIdentity& rank) {
  PlanOptions o = planner_options(config, needs, rank);
  o.micro_batch_tokens = batch.tokens();
  o.sequence_len = batch.sequence_len;
  if (config.offload.update_twice) {
    o.update_twice.assign(model.layers.size(), *config.offload.update_twice);
  }
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

/// The ranks gather a layer's weights in step with each other, so they load equally far ahead, and
/// copies of the state write checkpoints chunk by chunk in turns.
Layout plan_alike(const TrainConfig& config, PlanOptions options, const ModelShape& model,
                  const Ranks& ranks) {
  Layout layout = plan_layout(model, solved_options(config, options, model));
  const auto least = [&](uint64_t own) { return std::ranges::min(ranks.gather(own)); };
  const uint64_t depth = least(layout.prefetch_depth), chunk = least(layout.chunk_parameters);
  const bool alike = depth == layout.prefetch_depth && chunk == layout.chunk_parameters;
  // All plan again, or none: planning does not wait for others, what follows does.
  if (least(alike ? 1 : 0) == 1) return layout;
  options.prefetch_depth = static_cast<uint32_t>(depth);
  options.chunk_parameters = chunk;
  return plan_layout(model, solved_options(config, options, model));
}

/// `device: auto` becomes a GPU where the build and the machine have one.
TrainConfig with_chosen_device(TrainConfig config) {
  DeviceMode& device = config.offload.device;
  if (device != DeviceMode::automatic) return config;
  const bool has_gpu = *cuda_model_absence() == '\0' && !cuda_devices().gpus.empty();
  device = has_gpu ? DeviceMode::cuda : DeviceMode::unified;
  return config;
}

std::optional<uint32_t> chosen_gpu(const TrainConfig& config, const Ranks& ranks) {
  const bool on_gpu = config.offload.device == DeviceMode::cuda;
  if (ranks.size() > 1) check_backend(config, on_gpu);
  std::optional<uint32_t> gpu;
  if (on_gpu) gpu = gpu_of_local_rank(ranks.identity().local_rank);
  require_own_gpus(ranks, gpu);
  return gpu;
}

std::unique_ptr<Model> make_layers(const RunSetup& setup) {
  if (setup.gpu) {
    return make_cuda_model(setup.model, setup.weight_type(), setup.batch, *setup.gpu);
  }
  return std::make_unique<Llama>(setup.model, setup.weight_type(), setup.batch, host_kernels());
}

bool has_documents(const TrainConfig& config) {
  return std::ranges::any_of(config.datasets, [](const DatasetConfig& dataset) {
    return is_prepared_file(dataset.path, dataset.type);
  });
}

ComputeNeeds needs_of(const RunSetup& setup, const RankIdentity& rank) {
  if (!setup.gpu) {
    return host_needs(setup.config, setup.model, setup.batch, parallel_threads(), rank);
  }
  const GpuMemory gpu = gpu_memory(*setup.gpu);
  return {.scratch_bytes = setup.scratch_bytes() + gpu_staging_bytes(setup.config, rank),
          .activation_bytes = dtype_bytes(setup.layers->activation_type()),
          .unified = false,
          .streams = true,
          .device_memory = part_of_memory(gpu.free, kDevicePart),
          .host_memory = part_of_memory(machine_memory() / rank.local_ranks, kHostPart)};
}

RunSetup::RunSetup(const TrainConfig& c, const Ranks& ranks)
    : config(with_chosen_device(with_own_devices(with_chosen_drives(c), ranks))),
      cpus(process_cpus()),
      model(trained_model(c)),
      batch{c.micro_batch_size, c.sequence_len, has_documents(c)},
      gpu(chosen_gpu(config, ranks)),
      layers(make_layers(*this)),
      state(make_state_math(model, gpu)),
      layout(plan_alike(
          config,
          plan_options(config, model, batch, needs_of(*this, ranks.identity()), ranks.identity()),
          model, ranks)) {
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
