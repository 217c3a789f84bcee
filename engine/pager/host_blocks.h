// Host memory that a program asks for: whole pages, on a NUMA node of its choice. Thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>

#include "offload/arena.h"

namespace overspill {

class HostBlocks {
 public:
  /// Zeroed; without a node, where the calling thread runs. Throws MisuseError for a node that is
  /// not there, Error(does_not_fit).
  std::byte* allocate(uint64_t bytes, std::optional<uint32_t> node);
  /// Throws MisuseError for what is not from here.
  void free(std::byte* memory);

 private:
  std::mutex mutex_;
  std::map<std::byte*, Arena> blocks_;
};

}  // namespace overspill
