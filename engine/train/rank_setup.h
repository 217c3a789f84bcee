// What the ranks of a run settle before it begins: who shares what, which cores and devices each
// has, and that all of them mean the same run. Of one rank, nothing.
#pragma once

#include <utility>
#include <vector>

#include "engine/base/thread.h"
#include "engine/collective/ranks.h"
#include "engine/train/config.h"

namespace overspill {

/// How the ranks of a run with this configuration meet. Throws Error(invalid_config) for a backend
/// that this run's device has not.
Ranks::Options ranks_options(const TrainConfig& config);

/// Writes into the options what a rank shares, and with how many.
void share_state(const TrainConfig& config, const RankIdentity& rank, PlanOptions& options);

/// Divides CPUs among the ranks that may use the same: binds the calling thread, and those that it
/// starts, to this rank's part, near its drives.
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
