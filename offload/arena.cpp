// mmap, MADV_HUGEPAGE and a first touch.
#include "offload/arena.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>

#include "engine/base/error.h"
#include "engine/base/parallel.h"
#include "engine/base/units.h"

namespace overspill {
namespace {

constexpr uint64_t kHugePage = 2 * kMiB;
constexpr uint64_t kSmallPage = 4 * kKiB;

}  // namespace

Arena::Arena(uint64_t bytes, const std::string& name) : bytes_(round_up(bytes, kSmallPage)) {
  if (bytes_ == 0) return;
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
  parallel_blocks(bytes_, 16 * kHugePage, [&](uint64_t begin, uint64_t end) {
    for (uint64_t at = begin; at < end; at += kSmallPage) memory_[at] = std::byte{0};
  });
}

Arena::~Arena() {
  if (memory_ != nullptr) munmap(memory_, bytes_);
}

}  // namespace overspill
