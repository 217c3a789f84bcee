// Page-aligned host memory for slots, on huge pages where the system gives them, touched at once so
// that nothing is allocated later. Move-only; contents start as zero.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

namespace overspill {

class Arena {
 public:
  Arena() = default;
  /// Throws Error(does_not_fit) naming the arena when the system refuses the memory.
  Arena(uint64_t bytes, const std::string& name);
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
