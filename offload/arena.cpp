// mmap, MADV_HUGEPAGE and a first touch.
#include "offload/arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <optional>
#include <string_view>

#include "engine/base/error.h"
#include "engine/base/units.h"

namespace overspill {
namespace {

constexpr uint64_t kHugePage = 2 * kMiB;
constexpr uint64_t kSmallPage = 4 * kKiB;

/// The first number of a small system file, if it has one.
std::optional<uint64_t> first_number(const std::string& path) {
  std::ifstream file(path);
  uint64_t value = 0;
  return file >> value ? std::optional(value) : std::nullopt;
}

/// What a new allocation may take without swapping or the out-of-memory killer: the system's
/// MemAvailable, and what a container's limit (cgroup 2 or 1) leaves.
uint64_t available_bytes() {
  uint64_t available = UINT64_MAX;
  std::ifstream meminfo("/proc/meminfo");
  for (std::string line; std::getline(meminfo, line);) {
    constexpr std::string_view kKey = "MemAvailable:";
    if (line.starts_with(kKey)) available = std::stoull(line.substr(kKey.size())) * kKiB;
  }
  const auto limit = [&](const std::string& maximum, const std::string& used) {
    const auto most = first_number(maximum), now = first_number(used);
    if (most && now) available = std::min(available, *most - std::min(*most, *now));
  };
  limit("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current");
  limit("/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes");
  return available;
}

/// A page comes from the node of the thread that first writes to it; later writes move nothing.
void touch(std::span<std::byte> memory, uint64_t block) {
  parallel_blocks(memory.size(), block, [&](uint64_t begin, uint64_t end) {
    for (uint64_t at = begin; at < end; at += kSmallPage) memory[at] = std::byte{0};
  });
}

}  // namespace

Arena::Arena(uint64_t bytes, const std::string& name, std::span<const ArenaPart> parts)
    : bytes_(round_up(bytes, kSmallPage)) {
  if (bytes_ == 0) return;
  if (const uint64_t available = available_bytes(); bytes_ > available) {
    fail(ErrorCode::does_not_fit,
         "{} memory: the run needs {}, but only {} of this machine's memory is available; lower "
         "offload.{}_memory so that more lives on NVMe, or end other programs",
         name, format_bytes(bytes_), format_bytes(available), name);
  }
  const bool huge = bytes_ >= kHugePage;
  const uint64_t reserved = bytes_ + (huge ? kHugePage : 0);
  void* raw = mmap(nullptr, reserved, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) {
    fail(ErrorCode::does_not_fit, "{} memory: the system refused {}: {}; lower offload.{}_memory",
         name, format_bytes(bytes_), errno_text(errno), name);
  }
  auto* base = static_cast<std::byte*>(raw);
  memory_ = base;
  if (huge) {  // keep only the aligned part
    const uint64_t skip = (kHugePage - reinterpret_cast<uintptr_t>(base) % kHugePage) % kHugePage;
    memory_ = base + skip;
    if (skip > 0) munmap(base, skip);
    if (reserved > skip + bytes_) munmap(memory_ + bytes_, reserved - skip - bytes_);
    madvise(memory_, bytes_, MADV_HUGEPAGE);  // a hint: small pages are slower, not wrong
  }
  for (const ArenaPart& part : parts) {
    CHECK(part.offset + part.bytes <= bytes_);
    touch({memory_ + part.offset, part.bytes}, kHugePage);
  }
  touch({memory_, bytes_}, 16 * kHugePage);
}

Arena::~Arena() {
  if (memory_ != nullptr) munmap(memory_, bytes_);
}

}  // namespace overspill
