// Budgets of ranks on described machines.
#include "engine/train/plan_request.h"

#include "engine/model/llama.h"
#include "engine/train/run_setup.h"

namespace overspill {
namespace {

uint64_t part_of(uint64_t bytes, double part, uint32_t ranks) {
  return static_cast<uint64_t>(static_cast<double>(bytes) * part / ranks) / 4096 * 4096;
}

/// `target.ranks` ranks share the host's memory and the drives; each has a device of its own.
void use_hardware(const OffloadConfig& offload, const HardwareProfile& hardware, uint32_t ranks,
                  PlanOptions& options) {
  options.unified = !hardware.device.accelerator;
  // Without an accelerator, the device's memory is half of the host's.
  const double part = options.unified ? kHostPart / 2 : kHostPart;
  const uint64_t host = part_of(hardware.host.memory, part, ranks);
  const uint64_t device = options.unified ? host : part_of(hardware.device.memory, kDevicePart, 1);
  if (!offload.device_memory && device > 0) options.device_memory = device;
  if (!offload.host_memory && host > 0) options.host_memory = host;
  if (!offload.nvme_capacity && hardware.drives.capacity > 0) {
    options.nvme_capacity = part_of(hardware.drives.capacity, kDrivePart, ranks);
  }
  options.nvme_files = hardware.drives.count;
  options.nvme_shares.clear();
}

}  // namespace

ForecastRequest forecast_request(const TrainConfig& config, const PlanTarget& target) {
  const ModelShape model = trained_model(config);
  const BatchShape batch{config.micro_batch_size, config.sequence_len};
  const Llama llama(model, config.precision == Precision::bf16 ? DType::bf16 : DType::f32, batch,
                    host_kernels());
  ForecastRequest request;
  request.model = model;
  request.options = plan_options(config, batch, llama);
  request.options.ranks = target.ranks;
  request.hardware =
      target.hardware.value_or(config.offload.hardware_profile.value_or(HardwareProfile{}));
  if (target.hardware) {
    use_hardware(config.offload, *target.hardware, target.ranks, request.options);
  }
  request.steps = config.max_steps;
  return request;
}

}  // namespace overspill
