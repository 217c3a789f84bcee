// `overspill bench nvme`: sweeps every path alone, then all together, and recommends settings.
// One call, one thread; writes only files of its own, which have no names while it runs.
#pragma once

#include <atomic>
#include <filesystem>
#include <string>
#include <vector>

#include "engine/base/units.h"
#include "engine/bench/bench_files.h"
#include "engine/bench/bench_rounds.h"
#include "engine/bench/nvme_sweep.h"
#include "nvme/async_io.h"

namespace overspill {

struct NvmeBenchOptions {
  std::vector<std::filesystem::path> paths;
  uint64_t bytes_per_path = 4 * kGiB;
  double seconds_per_point = 2;
  std::vector<uint64_t> block_sizes = {256 * kKiB, kMiB, 4 * kMiB, 16 * kMiB};
  std::vector<uint32_t> depths = {1, 4, 16, 64};
  bool sequential = true;  ///< measure pages in file order too
  bool verify = false;     ///< with checksums, as training has them by default
  IoBackend backend = IoBackend::automatic;
  DiskSpaceReader disk_space = read_disk_space;
};

/// Throws Error when a path is refused, options leave nothing to measure, a drive fails, or `stop`
/// was set (ErrorCode::cancelled).
NvmeBenchReport run_nvme_benchmark(const NvmeBenchOptions& options, const std::atomic<bool>& stop,
                                   const BenchProgress& progress);

/// The page that is read and written: a chunk's record, or less where the file is small.
uint64_t bench_page_bytes(uint64_t bytes_per_path);

}  // namespace overspill
