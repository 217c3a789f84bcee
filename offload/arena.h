// Page-aligned host memory for slots, on huge pages where the system gives them, touched at once so
// that nothing is allocated later, on the NUMA nodes of the threads that touch them. Move-only;
// contents start as zero.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>

#include "engine/base/parallel.h"

namespace overspill {

/// A piece of an arena that parallel_for will work on as a whole.
struct ArenaPart {
  uint64_t offset;
  uint64_t bytes;
};

class Arena {
 public:
  Arena() = default;
  /// Each part is touched by all groups of threads in proportion, as they will share the work on
  /// it, so that every thread finds its range on its own node. Parts overlap nowhere. Throws
  /// Error(does_not_fit) naming the arena when the system refuses the memory.
  Arena(uint64_t bytes, const std::string& name, std::span<const ArenaPart> parts = {});
  Arena(Arena&& other) noexcept
      : memory_(std::exchange(other.memory_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  Arena& operator=(Arena&&) = delete;
  ~Arena();

  std::byte* memory() const { return memory_; }
  uint64_t bytes() const { return bytes_; }

 private:
  std::byte* memory_ = nullptr;
  uint64_t bytes_ = 0;
};

}  // namespace overspill
