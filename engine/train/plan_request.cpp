// Budgets of ranks on described machines.
#include "engine/train/plan_request.h"

#include <algorithm>

#include "engine/base/error.h"
#include "engine/base/log.h"
#include "engine/base/units.h"
#include "engine/model/llama.h"
#include "engine/train/run_setup.h"

namespace overspill {
namespace {

uint64_t part_of(uint64_t bytes, double part, uint32_t ranks) {
  return static_cast<uint64_t>(static_cast<double>(bytes) * part / ranks) / 4096 * 4096;
}

/// What it needs there, whatever the number of processors here.
uint64_t scratch_bytes(const HardwareProfile& hardware, const Llama& llama, uint32_t ranks) {
  if (hardware.device.accelerator) return llama.scratch_bytes(0);
  return llama.scratch_bytes(std::max(hardware.host.cores / ranks, 1u));
}

/// The ranks share the host's memory and the drives; each has a device of its own.
void use_hardware(const OffloadConfig& offload, const HardwareProfile& hardware, uint32_t ranks,
                  PlanOptions& options) {
  const bool accelerator = hardware.device.accelerator;
  options.unified = !accelerator && offload.device == DeviceMode::unified;
  // Without an accelerator, the device's memory is half of the host's.
  const uint64_t host =
      part_of(hardware.host.memory, accelerator ? kHostPart : kHostPart / 2, ranks);
  const uint64_t device = accelerator ? part_of(hardware.device.memory, kDevicePart, 1) : host;
  if (!offload.device_memory && device > 0) options.device_memory = device;
  if (!offload.host_memory && host > 0) options.host_memory = host;
  if (!offload.nvme_capacity && hardware.drives.capacity > 0) {
    options.nvme_capacity = part_of(hardware.drives.capacity, kDrivePart, ranks);
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
  const Llama llama(model, config.precision == Precision::bf16 ? DType::bf16 : DType::f32, batch,
                    host_kernels());
  ForecastRequest request;
  request.model = model;
  RankIdentity rank;
  rank.ranks = rank.local_ranks = target.ranks;
  request.options = plan_options(config, batch, llama, rank);
  request.hardware =
      target.hardware.value_or(config.offload.hardware_profile.value_or(HardwareProfile{}));
  check_ranks(request.hardware, target.ranks);
  if (target.hardware || request.hardware.device.accelerator) {
    use_hardware(config.offload, request.hardware, target.ranks, request.options);
    request.options.compute_scratch_bytes = scratch_bytes(request.hardware, llama, target.ranks);
  }
  if (config.sequence_len > model.config.max_position_embeddings) {
    log_warning("sequence_len {} is above the model's max_position_embeddings {}",
                config.sequence_len, model.config.max_position_embeddings);
  }
  request.steps = config.max_steps;
  return request;
}

}  // namespace overspill
