// Host memory that a program asks for: whole pages, on a NUMA node of its choice, pinned where a
// GPU is to use it. Thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>

#include "offload/arena.h"
#include "offload/cuda_device.h"

namespace overspill {

class HostBlocks {
 public:
  /// `gpu`: none where the device is the host.
  explicit HostBlocks(std::optional<uint32_t> gpu) : gpu_(gpu) {}
  /// Zeroed; without a node, where the calling thread runs. Throws MisuseError for a node that is
  /// not there, Error(does_not_fit).
  std::byte* allocate(uint64_t bytes, std::optional<uint32_t> node);
  /// Throws MisuseError for what is not from here.
  void free(std::byte* memory);

 private:
  struct Block {
    Arena arena;
    PinnedMemory pinned;  ///< released before the arena
  };

  const std::optional<uint32_t> gpu_;
  std::mutex mutex_;
  std::map<std::byte*, Block> blocks_;
};

}  // namespace overspill
