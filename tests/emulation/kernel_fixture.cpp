// Guarded memory.
#include "tests/emulation/kernel_fixture.h"

#include <sys/mman.h>
#include <unistd.h>

#include <new>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, bytes) ((void)(address), (void)(bytes))
#define ASAN_UNPOISON_MEMORY_REGION(address, bytes) ((void)(address), (void)(bytes))
#endif

namespace overspill::test {
namespace {
constexpr std::byte kCanary{0xa5};
}

GuardedMemory::GuardedMemory(size_t bytes, size_t misalign) : bytes_(bytes) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t usable = (bytes + 32 + page - 1) / page * page;
  mapped_ = page + usable + page;
  void* memory = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  mapping_ = static_cast<std::byte*>(memory);
  mprotect(mapping_, page, PROT_NONE);
  std::byte* const end = mapping_ + page + usable;
  mprotect(end, page, PROT_NONE);
  // The last start of that alignment whose bytes fit.
  const size_t slack = (16 - (bytes + 16 - misalign) % 16) % 16;
  start_ = end - slack - bytes;
  for (std::byte* at = mapping_ + page; at < start_; ++at) *at = kCanary;
  for (std::byte* at = start_ + bytes; at < end; ++at) *at = kCanary;
  ASAN_POISON_MEMORY_REGION(mapping_ + page, static_cast<size_t>(start_ - mapping_) - page);
  // Poison begins at whole granules of 8.
  ASAN_POISON_MEMORY_REGION(start_ + bytes, slack);
}

GuardedMemory::~GuardedMemory() {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  ASAN_UNPOISON_MEMORY_REGION(mapping_ + page, mapped_ - 2 * page);
  const std::byte* const end = mapping_ + mapped_ - page;
  size_t changed = 0;
  for (const std::byte* at = mapping_ + page; at < start_; ++at) changed += *at != kCanary;
  for (const std::byte* at = start_ + bytes_; at < end; ++at) changed += *at != kCanary;
  EXPECT_EQ(changed, 0u) << "bytes written beside an array of " << bytes_;
  munmap(mapping_, mapped_);
}

}  // namespace overspill::test
