// Checks before a benchmark writes, and its private directory.
#include "engine/bench/bench_files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <map>
#include <set>
#include <system_error>
#include <utility>
#include <vector>

#include "engine/base/error.h"
#include "engine/base/fd.h"
#include "engine/base/log.h"
#include "engine/base/units.h"

namespace overspill {
namespace {

namespace fs = std::filesystem;

struct stat stat_directory(const fs::path& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) {
    const ErrorCode code = errno == ENOENT ? ErrorCode::not_found : ErrorCode::io;
    fail(code, "--path {}: {}; name an existing directory on the drive to measure", path.string(),
         errno_text(errno));
  }
  if (!S_ISDIR(status.st_mode)) {
    fail(ErrorCode::invalid_config,
         "--path {} is no directory; name a directory on the drive to measure", path.string());
  }
  return status;
}

void check_writable(const fs::path& path) {
  if (::access(path.c_str(), W_OK | X_OK) == 0) return;
  fail(ErrorCode::io,
       "--path {}: no permission to create files there ({}); change its permissions, or name "
       "another directory",
       path.string(), errno_text(errno));
}

[[noreturn]] void refuse_full(const fs::path& path, const DiskSpace& space, uint64_t bytes) {
  if (space.total_bytes() == 0) {
    fail(ErrorCode::does_not_fit,
         "--path {} is on a file system without room for files; name a directory on a drive",
         path.string());
  }
  const auto total = static_cast<double>(space.total_bytes());
  const double after = static_cast<double>(space.used_bytes + bytes) / total;
  const auto most = static_cast<uint64_t>(kFullestDisk * total);
  fail(ErrorCode::does_not_fit,
       "--path {}: {} more would fill its file system to {:.0f} % ({} in use, {} available); a "
       "benchmark stays below {:.0f} %: use --size of at most {}, or free space there",
       path.string(), format_bytes(bytes), 100 * after, format_bytes(space.used_bytes),
       format_bytes(space.available_bytes), 100 * kFullestDisk,
       format_bytes(most > space.used_bytes ? most - space.used_bytes : 0));
}

}  // namespace

DiskSpace read_disk_space(const fs::path& directory) {
  struct statvfs status {};
  if (::statvfs(directory.c_str(), &status) != 0) {
    fail(ErrorCode::io, "statvfs {}: {}; check --path", directory.string(), errno_text(errno));
  }
  const uint64_t block = status.f_frsize;
  return {.used_bytes = block * (status.f_blocks - status.f_bfree),
          .available_bytes = block * status.f_bavail};
}

void check_bench_paths(std::span<const fs::path> paths, uint64_t bytes_each,
                       const DiskSpaceReader& space) {
  std::set<std::pair<dev_t, ino_t>> directories;
  std::map<dev_t, std::vector<fs::path>> disks;
  for (const fs::path& path : paths) {
    const struct stat status = stat_directory(path);
    check_writable(path);
    if (!directories.emplace(status.st_dev, status.st_ino).second) {
      fail(ErrorCode::invalid_config, "--path {} names a directory a second time; name each once",
           path.string());
    }
    disks[status.st_dev].push_back(path);
  }
  for (const auto& [device, on_it] : disks) {
    const uint64_t bytes = bytes_each * on_it.size();
    const DiskSpace now = space(on_it.front());
    const double after = static_cast<double>(now.used_bytes) + static_cast<double>(bytes);
    if (after > kFullestDisk * static_cast<double>(now.total_bytes())) {
      refuse_full(on_it.front(), now, bytes);
    }
    if (on_it.size() > 1) {
      log_warning("{} and {} are on one file system: together they cannot be faster than alone",
                  on_it[0].string(), on_it[1].string());
    }
  }
}

int drive_numa_node(const fs::path& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) return -1;
  std::error_code error;
  fs::path device = fs::canonical(
      fmt::format("/sys/dev/block/{}:{}", major(status.st_dev), minor(status.st_dev)), error);
  // From the partition up to the PCI function, which knows its node.
  for (; !error && device.has_relative_path(); device = device.parent_path()) {
    if (!fs::exists(device / "numa_node")) continue;
    try {
      return std::atoi(read_text_file(device / "numa_node").c_str());
    } catch (const Error&) {
      return -1;
    }
  }
  return -1;
}

BenchDirectory::BenchDirectory(const fs::path& parent) {
  std::string name = (fs::absolute(parent) / "overspill-bench-XXXXXX").string();
  if (::mkdtemp(name.data()) == nullptr) {
    fail(ErrorCode::io, "make a directory in {}: {}; name a directory that can be written (--path)",
         parent.string(), errno_text(errno));
  }
  path_ = name;
}

BenchDirectory::BenchDirectory(BenchDirectory&& other) noexcept
    : path_(std::exchange(other.path_, fs::path())) {}

void BenchDirectory::remove() noexcept {
  if (path_.empty()) return;
  std::error_code ignored;
  fs::remove_all(path_, ignored);
  if (!ignored) path_.clear();
}

}  // namespace overspill
