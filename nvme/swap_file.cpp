// Headers, locks and reclaiming of swap files.
#include "nvme/swap_file.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <optional>
#include <system_error>
#include <thread>
#include <vector>

#include "engine/base/error.h"
#include "engine/base/log.h"
#include "engine/base/random.h"
#include "engine/base/units.h"

namespace overspill::swap_file {
namespace {

constexpr std::chrono::seconds kLockPatience{30};

namespace fs = std::filesystem;

uint64_t header_checksum(const SwapHeader& header) {
  std::array<uint64_t, kHeaderBytes / 8> words;
  std::memcpy(words.data(), &header, kHeaderBytes);
  uint64_t sum = 0;
  for (size_t i = 0; i + 1 < words.size(); ++i) sum = mix64(sum ^ words[i]);
  return sum;
}

bool has_swap_name(const fs::path& path) {
  const std::string name = path.filename().string();
  return name.starts_with("overspill-") && name.ends_with(".swap");
}

std::optional<SwapHeader> read_header(const Fd& file) {
  SwapHeader header;
  const ssize_t got = pread(file.get(), &header, sizeof(header), 0);
  if (got < static_cast<ssize_t>(kMagic.size()) || header.magic != kMagic) return std::nullopt;
  // A run that died while it wrote its header.
  if (got != sizeof(header) || header.checksum != header_checksum(header)) header.pid = 0;
  return header;
}

/// Locks a file that no live run holds. The kernel closes the files of an io_uring that was killed
/// a moment after its process has gone, so a lock of a process that is gone is waited for.
bool lock_left_over(const Fd& file, const std::optional<SwapHeader>& header) {
  if (lock_now(file.get())) return true;
  std::array<char, 64> host{};
  const bool gone = header && header->pid != 0 && gethostname(host.data(), host.size() - 1) == 0 &&
                    header->host == host && kill(static_cast<pid_t>(header->pid), 0) != 0 &&
                    errno == ESRCH;
  for (int tries = 0; gone && tries < 200; ++tries) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    if (lock_now(file.get())) return true;
  }
  return false;
}

/// Deletes one file if it is a dead run's.
void reclaim_file(const fs::path& path) {
  // O_NOFOLLOW: a link of that name is not ours, and following it could delete someone's file.
  const Fd file(::open(path.c_str(), O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC), path);
  if (!file.valid()) {
    if (errno != ENOENT) log_debug("leave {} alone: {}", path.string(), errno_text(errno));
    return;
  }
  const std::optional<SwapHeader> header = read_header(file);
  if (!lock_left_over(file, header)) return;  // a live run's
  if (!header) {
    log_warning(
        "{} has the name of a swap file but not its content, so it is left alone; delete "
        "it if nobody needs it",
        path.string());
    return;
  }
  const uint64_t size = file_size(file);
  if (unlink(path.c_str()) != 0) {
    log_warning("cannot delete the dead run's swap file {} ({}): {}; delete it by hand",
                path.string(), format_bytes(size), errno_text(errno));
    return;
  }
  std::string owner = "of a dead run";
  if (header->pid != 0) owner += fmt::format(" (pid {} on {})", header->pid, header->host.data());
  log_info("reclaimed {} {}: {}", format_bytes(size), owner, path.string());
}

}  // namespace

SwapHeader make_header(uint64_t run_id, uint64_t stripe_bytes, size_t index, size_t count) {
  SwapHeader header;
  header.file_index = static_cast<uint32_t>(index);
  header.file_count = static_cast<uint32_t>(count);
  header.pid = static_cast<uint32_t>(getpid());
  header.run_id = run_id;
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  header.started_unix_s =
      static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::seconds>(now).count());
  header.stripe_bytes = stripe_bytes;
  if (gethostname(header.host.data(), header.host.size() - 1) != 0) header.host[0] = '?';
  header.checksum = header_checksum(header);
  return header;
}

bool lock_now(int fd) {
  int outcome;
  do {
    outcome = flock(fd, LOCK_EX | LOCK_NB);
  } while (outcome != 0 && errno == EINTR);
  return outcome == 0;
}

Fd lock_directory(const fs::path& directory) {
  Fd fd = open_file(directory, O_RDONLY | O_DIRECTORY);
  const auto deadline = std::chrono::steady_clock::now() + kLockPatience;
  while (flock(fd.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno == EINTR) continue;
    if (errno != EWOULDBLOCK) {
      log_debug("cannot lock {}: {}", directory.string(), errno_text(errno));
      break;
    }
    if (std::chrono::steady_clock::now() > deadline) {
      fail(
          ErrorCode::io,
          "{}: another process has had this directory locked for {} s, longer than a run needs to "
          "make its swap file: it is probably stopped (state T in ps); continue it (kill -CONT) or "
          "end it, or choose another directory in offload.nvme_paths",
          directory.string(), kLockPatience.count());
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  return fd;
}

void reclaim_dead_files(const fs::path& directory) {
  const Fd lock = lock_directory(directory);
  std::vector<fs::path> candidates;
  std::error_code error;
  for (fs::directory_iterator entry(directory, error), end; !error && entry != end;
       entry.increment(error)) {
    std::error_code ignored;
    if (has_swap_name(entry->path()) && fs::is_regular_file(entry->symlink_status(ignored))) {
      candidates.push_back(entry->path());
    }
  }
  if (error) {
    fail(ErrorCode::io, "list {}: {}; check its permissions (offload.nvme_paths)",
         directory.string(), error.message());
  }
  for (const fs::path& path : candidates) reclaim_file(path);
}

}  // namespace overspill::swap_file
