// What the ranks of a run settle before it begins: who shares what, which cores and devices each
// has, and that all of them mean the same run. Of one rank, nothing.
#pragma once

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "engine/base/thread.h"
#include "engine/collective/nccl_collective.h"
#include "engine/collective/ranks.h"
#include "engine/train/config.h"
#include "offload/cuda_device.h"

namespace overspill {

/// How the ranks of a run with this configuration meet.
Ranks::Options ranks_options(const TrainConfig& config);

/// Throws Error(invalid_config) for a backend that this run's device has not.
void check_backend(const TrainConfig& config, bool on_gpu);

/// Throws Error(invalid_config) on all ranks when two of a host have the same GPU. All call it,
/// also one whose device is the host.
void require_own_gpus(const Ranks& ranks, std::optional<uint32_t> gpu);

/// Memory of a GPU that its rank's groups need.
uint64_t gpu_staging_bytes(const TrainConfig& config, const RankIdentity& rank);

/// The groups of the model's data between GPUs, by NCCL on the device's collective stream.
/// Destroyed before the device. `staging` is gpu_staging_bytes() of its memory.
class GpuGroups {
 public:
  GpuGroups(const TrainConfig& config, const Ranks& ranks, CudaDevice& device, std::byte* staging);
  const RankGroups& groups() const { return groups_.groups(); }

 private:
  std::unique_ptr<NcclStream> stream_;
  Ranks::DataGroups groups_;
};

/// None of one rank, or where the device is the host.
std::unique_ptr<GpuGroups> make_gpu_groups(const TrainConfig& config, const Ranks& ranks,
                                           Device& device, std::byte* staging);

/// Writes into the options what a rank shares, and with how many.
void share_state(const TrainConfig& config, const RankIdentity& rank, PlanOptions& options);

/// Divides CPUs among the ranks that may use the same: binds the calling thread, and those that it
/// starts, to this rank's part, near its GPU or its drives.
CpuBinding bind_rank(const TrainConfig& config, const Ranks& ranks);

/// Ranks of a host share directories, each with files of its own, but divide the block devices that
/// several of them have chosen. Throws Error(invalid_config) when there are too few.
TrainConfig with_own_devices(TrainConfig config, const Ranks& ranks);

/// Makes output_dir. Throws Error(io) on all ranks when one does not see the first one's.
void require_shared_output(const std::filesystem::path& output_dir, const Ranks& ranks);

/// Throws Error(invalid_config) naming the first thing, and rank, that differs from the first
/// rank's.
void require_alike(const std::vector<std::pair<std::string, uint64_t>>& things, const Ranks& ranks);

}  // namespace overspill
