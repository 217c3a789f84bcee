// What decides whether completions of files can be polled for. Pure queries of descriptors and
// /sys; whether polling then works, a probe shows.
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "nvme/io_backends.h"

namespace overspill::io_backend {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kMemoryPage = 4096;  // that lies anywhere, and takes a segment then

/// 0 when there is no such setting.
uint64_t setting(const fs::path& queue, const char* name) {
  std::ifstream file(queue / name);
  uint64_t value = 0;
  return file >> value ? value : 0;
}

/// The largest request that reaches the drive in one piece, wherever its memory lies; 0 when the
/// drive has no poll queues.
uint64_t largest_polled(const fs::path& queue) {
  const uint64_t segments = setting(queue, "max_segments");
  if (setting(queue, "io_poll") != 1 || segments == 0) return 0;
  return std::min(setting(queue, "max_sectors_kb") << 10, (segments - 1) * kMemoryPage);
}

uint64_t largest_polled(int file) {
  struct stat status {};
  // A file's request may lie in two places; Linux then polls for one and may lose the other.
  if (fstat(file, &status) != 0 || !S_ISBLK(status.st_mode)) return 0;
  const dev_t device = status.st_rdev;
  const fs::path drive = fmt::format("/sys/dev/block/{}:{}", major(device), minor(device));
  // A partition's directory lies in its drive's, which has the queues.
  return std::max(largest_polled(drive / "queue"), largest_polled(drive / "../queue"));
}

}  // namespace

bool all_direct(std::span<const int> files) {
  return std::ranges::all_of(files, [](int file) {
    const int flags = fcntl(file, F_GETFL);
    return flags >= 0 && (flags & O_DIRECT) != 0;
  });
}

bool all_can_be_polled(std::span<const int> files, uint64_t bytes) {
  return all_direct(files) &&
         std::ranges::all_of(files, [&](int file) { return bytes <= largest_polled(file); });
}

std::vector<std::string> drives_with_poll_queues() {
  std::vector<std::string> names;
  std::error_code none;  // where /sys is not mounted
  for (const auto& drive : fs::directory_iterator("/sys/block", none)) {
    if (largest_polled(drive.path() / "queue") > 0)
      names.push_back(drive.path().filename().string());
  }
  std::ranges::sort(names);
  return names;
}

}  // namespace overspill::io_backend
