// Where a benchmark may write, and its files there: a fresh directory that nobody else knows, whose
// files lose their names as soon as they are open, so that nothing stays behind however the process
// ends. One thread.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>

namespace overspill {

struct DiskSpace {
  uint64_t used_bytes;
  uint64_t available_bytes;  ///< to this user; what is reserved for others counts as absent
  uint64_t total_bytes() const { return used_bytes + available_bytes; }
};
DiskSpace read_disk_space(const std::filesystem::path& directory);
using DiskSpaceReader = std::function<DiskSpace(const std::filesystem::path&)>;

/// Most of a disk that a benchmark may leave in use, for a moment.
inline constexpr double kFullestDisk = 0.90;

/// Throws Error when a path is no directory, is named twice or is not writable, or when
/// `bytes_each` more would fill its file system past 90 % (paths on one file system add up).
void check_bench_paths(std::span<const std::filesystem::path> paths, uint64_t bytes_each,
                       const DiskSpaceReader& space = read_disk_space);

/// The NUMA node of the drive below a path; -1 when unknown.
int drive_numa_node(const std::filesystem::path& path);

/// A directory with a unique name, removed with everything in it.
class BenchDirectory {
 public:
  explicit BenchDirectory(const std::filesystem::path& parent);
  ~BenchDirectory() { remove(); }
  BenchDirectory(BenchDirectory&& other) noexcept;
  BenchDirectory& operator=(BenchDirectory&&) = delete;

  const std::filesystem::path& path() const { return path_; }
  /// Takes the names of all files away, and the directory. Open files live on until closed.
  void remove() noexcept;

 private:
  std::filesystem::path path_;  // empty: nothing to remove
};

}  // namespace overspill
