// Swap files: having dead runs' reclaimed, creating and preallocating this run's, and the
// striped map over them. Creation is single-threaded; afterwards a Volume only answers queries.
// Moves no pages (see channel.cpp) and never reads what a former run left.
#include "nvme/volume.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <numeric>
#include <random>
#include <system_error>

#include "engine/base/error.h"
#include "engine/base/log.h"
#include "engine/base/random.h"
#include "engine/base/units.h"
#include "nvme/raw_device.h"
#include "nvme/swap_file.h"

namespace overspill {
namespace {

namespace fs = std::filesystem;
using namespace swap_file;

constexpr uint64_t kMostCapacity = uint64_t{1} << 62;  // keeps every offset an off_t

/// Directories made on the way to a volume, removed again unless the volume comes to be.
class NewDirectories {
 public:
  ~NewDirectories() {
    for (auto path = made_.rbegin(); path != made_.rend(); ++path) rmdir(path->c_str());
  }
  void make(const fs::path& directory) {
    for (const fs::path& path : missing_levels(directory)) {
      if (::mkdir(path.c_str(), 0755) == 0)
        made_.push_back(path);
      else if (errno != EEXIST)
        fail_to_make(directory, errno);
    }
    if (!fs::is_directory(directory)) fail_to_make(directory, ENOTDIR);
  }
  void keep() { made_.clear(); }

 private:
  static std::vector<fs::path> missing_levels(const fs::path& directory) {
    std::vector<fs::path> missing;
    std::error_code ignored;
    for (fs::path path = directory; !path.empty() && !fs::exists(path, ignored);
         path = path.parent_path()) {
      if (path.has_filename()) missing.insert(missing.begin(), path);
    }
    return missing;
  }
  [[noreturn]] static void fail_to_make(const fs::path& directory, int error) {
    fail(ErrorCode::io,
         "make directory {}: {}; set offload.nvme_paths to a directory that can be "
         "written",
         directory.string(), errno_text(error));
  }

  std::vector<fs::path> made_;
};

void check_distinct(const std::vector<fs::path>& directories) {
  std::vector<std::pair<dev_t, ino_t>> seen;
  for (const fs::path& directory : directories) {
    struct stat status {};
    if (stat(directory.c_str(), &status) != 0) {
      fail(ErrorCode::io, "stat {}: {}; check offload.nvme_paths", directory.string(),
           errno_text(errno));
    }
    const std::pair identity{status.st_dev, status.st_ino};
    const auto same = std::find(seen.begin(), seen.end(), identity);
    if (same != seen.end()) {
      fail(ErrorCode::invalid_config,
           "offload.nvme_paths names one directory twice: {} and {}; name each drive once",
           directories[static_cast<size_t>(same - seen.begin())].string(), directory.string());
    }
    seen.push_back(identity);
  }
}

[[noreturn]] void fail_no_room(const fs::path& directory, uint64_t needed, uint64_t available,
                               const std::string& why) {
  fail(ErrorCode::does_not_fit,
       "swap file in {}: needs {} ({} bytes), {} ({} bytes) free{}; free space there, or set "
       "offload.nvme_paths to a larger drive or to several drives",
       directory.string(), format_bytes(needed), needed, format_bytes(available), available, why);
}

uint64_t free_bytes(const fs::path& directory) {
  struct statvfs status {};
  if (statvfs(directory.c_str(), &status) != 0) {
    fail(ErrorCode::io, "statvfs {}: {}; check offload.nvme_paths", directory.string(),
         errno_text(errno));
  }
  return uint64_t{status.f_bavail} * status.f_frsize;
}

void preallocate(const Fd& file, uint64_t bytes) {
  const fs::path directory = file.path().parent_path();
  const uint64_t available = free_bytes(directory);
  if (available < bytes) fail_no_room(directory, bytes, available, "");
  int outcome;
  do {
    outcome = fallocate(file.get(), 0, 0, static_cast<off_t>(bytes));
  } while (outcome != 0 && errno == EINTR);
  if (outcome == 0) return;
  if (errno == EOPNOTSUPP) {
    log_warning(
        "{} cannot preallocate (fallocate: {}), so the drive may fill up during the run; "
        "use ext4 or xfs, or keep {} free",
        directory.string(), errno_text(errno), format_bytes(bytes));
    outcome = ftruncate(file.get(), static_cast<off_t>(bytes));
    if (outcome == 0) return;
  }
  const int error = errno;
  if (error == ENOSPC || error == EFBIG || error == EDQUOT) {
    fail_no_room(directory, bytes, available, fmt::format(" (fallocate: {})", errno_text(error)));
  }
  fail(ErrorCode::io, "preallocate {} bytes of {}: {}; check the drive (dmesg)", bytes,
       file.path().string(), errno_text(error));
}

std::string file_system_name(int fd) {
  struct statfs status {};
  if (fstatfs(fd, &status) != 0) return "an unknown file system";
  switch (static_cast<uint64_t>(status.f_type) & 0xffffffffu) {
    case 0x01021994: return "tmpfs";
    case 0x858458f6: return "ramfs";
    case 0x794c7630: return "overlay";
    case 0x6969: return "nfs";
    case 0x65735546: return "fuse";
    case 0x2fc12fc1: return "zfs";
    case 0xef53: return "ext4";
    case 0x58465342: return "xfs";
    case 0x9123683e: return "btrfs";
    default: return fmt::format("file system type {:#x}", static_cast<uint64_t>(status.f_type));
  }
}

/// Switches the open file to O_DIRECT. False, and buffered again, where that does not really read.
bool make_direct(const Fd& file) {
  // Recent kernels accept O_DIRECT on tmpfs, which has no drive below it.
  const std::string kind = file_system_name(file.get());
  if (kind == "tmpfs" || kind == "ramfs") return false;
  const int flags = fcntl(file.get(), F_GETFL);
  if (flags < 0 || fcntl(file.get(), F_SETFL, flags | O_DIRECT) != 0) return false;
  alignas(kIoAlignment) std::array<std::byte, kIoAlignment> page;
  if (pread(file.get(), page.data(), page.size(), 0) == static_cast<ssize_t>(page.size())) {
    return true;
  }
  fcntl(file.get(), F_SETFL, flags);
  return false;
}

void warn_buffered(const Fd& file) {
  log_warning(
      "{} is on {}, without O_DIRECT: pages go through the page cache, which costs memory "
      "and speed; set offload.nvme_paths to ext4 or xfs on a local drive",
      file.path().parent_path().string(), file_system_name(file.get()));
}

Fd create_file(const fs::path& path) {
  const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (fd < 0) {
    fail(ErrorCode::io,
         "create {}: {}; the directory is not writable: change its permissions or "
         "offload.nvme_paths",
         path.string(), errno_text(errno));
  }
  return Fd(fd, path);
}

void lock_and_mark(const Fd& file, const SwapHeader& header) {
  if (!lock_now(file.get())) {
    fail(ErrorCode::io, "lock {}: {}; set offload.nvme_paths to a file system that supports flock",
         file.path().string(), errno_text(errno));
  }
  write_exact(file, 0, std::as_bytes(std::span(&header, 1)));
  // Before the large allocation: after a power cut, a file that holds space must be recognisable.
  sync_file(file);
}

uint64_t new_run_id() {
  std::random_device entropy;
  return uint64_t{entropy()} << 32 | entropy();
}

void remove_files(std::span<const Fd> files) noexcept {
  for (const Fd& file : files) {
    if (raw_device::is_block_device(file.path())) continue;
    // Unlinked before it is closed, so that no other run finds it unlocked.
    ::unlink(file.path().c_str());
  }
}

[[noreturn]] void refuse_device(const fs::path& path) {
  fail(ErrorCode::invalid_config,
       "offload.nvme_paths: {} is a block device, and all that is on it would be overwritten; set "
       "`allow_raw_devices: true` under `offload:` if that is meant, or name a directory",
       path.string());
}

/// Deletes a constructor's files unless it comes to its end.
class RemoveOnFailure {
 public:
  explicit RemoveOnFailure(std::vector<Fd>& files) : files_(files) {}
  ~RemoveOnFailure() {
    if (armed_) {
      remove_files(files_);
      files_.clear();
    }
  }
  void disarm() { armed_ = false; }

 private:
  std::vector<Fd>& files_;
  bool armed_ = true;
};

}  // namespace

uint64_t volume_file_bytes(uint64_t capacity_bytes, size_t files, uint64_t stripe_bytes,
                           std::span<const uint32_t> shares) {
  const uint64_t turns = shares.empty() ? files : std::reduce(shares.begin(), shares.end(), 0u);
  return files * kHeaderBytes + round_up(capacity_bytes, stripe_bytes * turns);
}

Volume::Volume(const VolumeOptions& options) : stripe_bytes_(options.stripe_bytes) {
  CHECK(options.capacity_bytes > 0 && options.capacity_bytes <= kMostCapacity);
  CHECK(stripe_bytes_ > 0 && stripe_bytes_ % kIoAlignment == 0);
  std::vector<fs::path> directories;
  for (const fs::path& directory : options.directories) {
    directories.push_back(fs::absolute(directory));
  }
  if (directories.empty()) {
    fail(ErrorCode::invalid_config, "offload.nvme_paths names no directory; name one per drive");
  }
  NewDirectories new_directories;
  std::vector<fs::path> true_directories;
  for (const fs::path& path : directories) {
    const bool device = raw_device::is_block_device(path);
    if (device && !options.allow_raw_devices) refuse_device(path);
    if (!device) true_directories.push_back(path);
  }
  for (const fs::path& directory : true_directories) new_directories.make(directory);
  check_distinct(directories);
  // All of them before the first allocation: two directories may share a drive.
  for (const fs::path& directory : true_directories) reclaim_dead_files(directory);

  const size_t count = directories.size();
  plan_round(options.shares, count);
  capacity_bytes_ = round_up(options.capacity_bytes, stripe_bytes_ * round_.size());
  const uint64_t rounds = capacity_bytes_ / (stripe_bytes_ * round_.size());
  reads_in_flight_ = std::vector<std::atomic<uint32_t>>(count);
  const uint64_t run_id = new_run_id();
  files_.reserve(count);
  RemoveOnFailure files_guard(files_);
  for (size_t i = 0; i < count; ++i) {
    add_swap_file(directories[i], run_id, kHeaderBytes + rounds * shares_[i] * stripe_bytes_);
  }
  files_guard.disarm();
  new_directories.keep();
}

void Volume::add_swap_file(const fs::path& directory, uint64_t run_id, uint64_t bytes) {
  if (raw_device::is_block_device(directory)) {
    files_.push_back(raw_device::open_exclusively(directory, bytes));
    return;
  }
  {
    const Fd lock = lock_directory(directory);
    files_.push_back(create_file(directory / fmt::format("overspill-{:016x}.swap", run_id)));
    lock_and_mark(files_.back(),
                  make_header(run_id, stripe_bytes_, files_.size() - 1, shares_.size()));
  }
  preallocate(files_.back(), bytes);
  const bool direct = make_direct(files_.back());
  if (!direct && direct_) warn_buffered(files_.back());
  direct_ = direct_ && direct;
}

/// Spreads the turns of a fast drive over the round, so that any few stripes in a row use them all.
void Volume::plan_round(std::span<const uint32_t> shares, size_t files) {
  shares_.assign(shares.begin(), shares.end());
  if (shares_.empty()) shares_.assign(files, 1);
  CHECK(shares_.size() == files && *std::ranges::min_element(shares_) > 0);
  const auto turns = std::reduce(shares_.begin(), shares_.end(), int64_t{0});
  std::vector<int64_t> credit(files);
  std::vector<uint32_t> taken(files);
  for (int64_t turn = 0; turn < turns; ++turn) {
    for (size_t i = 0; i < files; ++i) credit[i] += shares_[i];
    const auto next = static_cast<size_t>(std::ranges::max_element(credit) - credit.begin());
    credit[next] -= turns;
    round_.push_back({static_cast<uint32_t>(next), taken[next]++});
  }
}

Volume::~Volume() { remove_files(files_); }

Volume::Place Volume::place(uint64_t offset) const {
  CHECK(offset < capacity_bytes_);
  // One file has no stripe boundaries to stop at.
  if (files_.size() == 1) return {0, kHeaderBytes + offset, capacity_bytes_ - offset};
  const uint64_t stripe = offset / stripe_bytes_, within = offset % stripe_bytes_;
  const auto [file, nth] = round_[stripe % round_.size()];
  const uint64_t stripe_of_file = stripe / round_.size() * shares_[file] + nth;
  return {.file = file,
          .offset = kHeaderBytes + stripe_of_file * stripe_bytes_ + within,
          .contiguous_bytes = stripe_bytes_ - within};
}

}  // namespace overspill
