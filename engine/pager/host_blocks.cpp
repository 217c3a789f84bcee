// One arena for each block.
#include "engine/pager/host_blocks.h"

#include "engine/pager/misuse.h"
#include "offload/numa_binding.h"

namespace overspill {

std::byte* HostBlocks::allocate(uint64_t bytes, std::optional<uint32_t> node) {
  constexpr uint64_t kMost = uint64_t{1} << 50;
  if (bytes == 0) refuse(Misuse::bad_argument, "a block of no bytes");
  if (bytes > kMost) {
    throw Error(ErrorCode::does_not_fit, fmt::format("a block of {} bytes of host memory", bytes));
  }
  Arena block(bytes, "host");
  if (node && !place_on_node(block.memory(), block.bytes(), *node)) {
    refuse(Misuse::bad_argument,
           "NUMA node {}: the system has none, or does not let this process bind to it", *node);
  }
  std::byte* const memory = block.memory();
  PinnedMemory pinned;
  if (gpu_) pinned = PinnedMemory({memory, block.bytes()}, *gpu_);
  const std::lock_guard lock(mutex_);
  blocks_.emplace(memory, Block{std::move(block), std::move(pinned)});
  return memory;
}

void HostBlocks::free(std::byte* memory) {
  const std::lock_guard lock(mutex_);
  if (blocks_.erase(memory) == 1) return;
  refuse(Misuse::bad_argument, "memory that this engine has not given, or that is freed already");
}

}  // namespace overspill
