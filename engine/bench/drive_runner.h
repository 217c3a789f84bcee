// Moves pages between memory and drives at one setting and counts: the volume and channels that
// training uses, on files of its own. One thread; reads and writes at once run on two of its own.
#pragma once

#include <atomic>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/base/units.h"
#include "engine/bench/bench_files.h"
#include "engine/bench/nvme_sweep.h"
#include "nvme/integrity.h"
#include "nvme/volume.h"
#include "offload/arena.h"

namespace overspill {

/// Memory for pages on their way, one pool per side, filled with bits that no drive can compress.
struct BenchBuffers {
  BenchBuffers(uint64_t page_bytes, uint32_t pages);
  uint64_t page_bytes;
  uint32_t pages;  ///< of one side, used in turn
  Arena read, write;
};

class DriveRunner {
 public:
  struct Options {
    std::vector<std::filesystem::path> directories;
    uint64_t bytes_per_drive = 0;  ///< rounded down to whole pages
    uint64_t stripe_bytes = kMiB;
    /// Keep and check checksums, as training does by default. Then all blocks are of stripe_bytes.
    bool verify = false;
    uint32_t pages_per_call = 1;              ///< waited for together; at most pages
    IoOptions io;                             ///< backend and wrapper; sizes come with each point
    const std::atomic<bool>* stop = nullptr;  ///< ends a run between two calls
  };
  /// How long to measure: for a time, or for so many bytes on each side.
  struct Budget {
    double seconds = 0;
    uint64_t bytes = 0;  ///< 0: by time
  };

  /// Creates and preallocates the files, and takes their names away. Throws Error.
  DriveRunner(const Options& options, BenchBuffers& buffers);

  /// Writes every page once; bytes per second. Anything read before this would be no drive's rate.
  double write_first();
  /// Throws Error(cancelled) when stopped, Error(io) when a drive fails.
  BenchRates run(const BenchPoint& point, const Budget& budget);

  bool direct() const { return volume_->direct(); }
  const std::string& backend() const { return backend_; }
  uint64_t bytes() const { return page_count_ * buffers_.page_bytes; }

 private:
  struct Side;
  struct Clock;
  IoOptions io_for(const BenchPoint& point, bool writes) const;
  void start_call(Side& side, uint64_t pages);
  bool start_next(Side& side, const Clock& clock);
  void run_side(Side& side, const Clock& clock);

  Options options_;
  BenchBuffers& buffers_;
  std::optional<Volume> volume_;
  std::optional<Integrity> integrity_;
  uint64_t page_count_ = 0;
  uint64_t seed_ = 0;  // another order of pages in every run
  std::string backend_;
};

}  // namespace overspill
