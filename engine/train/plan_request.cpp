// Budgets of ranks on described machines.
#include "engine/train/plan_request.h"

#include <algorithm>

#include "engine/base/error.h"
#include "engine/base/log.h"
#include "engine/base/parallel.h"
#include "engine/base/units.h"
#include "engine/model/cuda_scratch.h"
#include "engine/train/rank_setup.h"
#include "engine/train/run_setup.h"

namespace overspill {

uint64_t part_of_memory(uint64_t bytes, double part) {
  return static_cast<uint64_t>(static_cast<double>(bytes) * part) / 4096 * 4096;
}

namespace {

/// What the hardware's device needs there, whatever this machine has.
ComputeNeeds needs_on(const HardwareProfile& hardware, const TrainConfig& config,
                      const ModelShape& model, const BatchShape& batch, const RankIdentity& rank) {
  const uint32_t cores = std::max(hardware.host.cores / rank.ranks, 1u);
  ComputeNeeds needs = host_needs(config, model, batch, cores, rank);
  if (!hardware.device.accelerator) return needs;
  const DType type = config.precision == Precision::bf16 ? DType::bf16 : DType::f32;
  needs.scratch_bytes = cuda_scratch_bytes(model, type, batch) + gpu_staging_bytes(config, rank);
  needs.activation_bytes = dtype_bytes(type);
  needs.unified = false;
  needs.streams = true;
  return needs;
}

/// The ranks share the host's memory and the drives; each has a device of its own.
void use_hardware(const OffloadConfig& offload, const HardwareProfile& hardware, uint32_t ranks,
                  PlanOptions& options) {
  const bool accelerator = hardware.device.accelerator;
  // Without an accelerator, the device's memory is half of the host's.
  const uint64_t host =
      part_of_memory(hardware.host.memory / ranks, accelerator ? kHostPart : kHostPart / 2);
  const uint64_t device = accelerator ? part_of_memory(hardware.device.memory, kDevicePart) : host;
  if (!offload.device_memory && device > 0) options.device_memory = device;
  if (!offload.host_memory && host > 0) options.host_memory = host;
  if (!offload.nvme_capacity && hardware.drives.capacity > 0) {
    options.nvme_capacity = part_of_memory(hardware.drives.capacity / ranks, kDrivePart);
  }
  options.nvme_files = hardware.drives.count;
  options.nvme_shares.clear();
}

void check_ranks(const HardwareProfile& hardware, uint32_t ranks) {
  const DeviceProfile& device = hardware.device;
  if (device.accelerator && ranks > device.count) {
    fail(ErrorCode::invalid_config,
         "--ranks {}: the profile has {} device{} ({}), and each rank needs one; lower --ranks, or "
         "raise device.count in the profile",
         ranks, device.count, device.count == 1 ? "" : "s", device.name);
  }
  if (ranks > 1 && hardware.collective == CollectiveProfile{}) {
    log_warning("the profile has no collective rates: {} a rank are assumed",
                format_rate(hardware.collective.all_gather));
  }
}

}  // namespace

ForecastRequest forecast_request(const TrainConfig& given, const PlanTarget& target) {
  TrainConfig config = given;
  resolve_batch(config, target.ranks);
  const ModelShape model = trained_model(config);
  const BatchShape batch{config.micro_batch_size, config.sequence_len};
  ForecastRequest request;
  request.model = model;
  RankIdentity rank;
  rank.ranks = rank.local_ranks = target.ranks;
  request.hardware =
      target.hardware.value_or(config.offload.hardware_profile.value_or(HardwareProfile{}));
  check_ranks(request.hardware, target.ranks);
  const bool there = target.hardware || request.hardware.device.accelerator;
  const ComputeNeeds needs = there ? needs_on(request.hardware, config, model, batch, rank)
                                   : host_needs(config, model, batch, parallel_threads(), rank);
  request.options = plan_options(config, model, batch, needs, rank);
  if (there) use_hardware(config.offload, request.hardware, target.ranks, request.options);
  if (config.sequence_len > model.config.max_position_embeddings) {
    log_warning("sequence_len {} is above the model's max_position_embeddings {}",
                config.sequence_len, model.config.max_position_embeddings);
  }
  request.steps = config.max_steps;
  return request;
}

}  // namespace overspill
