// In which order a step acquires layers: declared, or recorded in the first step. Says what comes
// next, and notices when the program does something else. One thread at a time.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace overspill {

class AccessOrder {
 public:
  explicit AccessOrder(uint32_t layers = 0) : layers_(layers) {}

  void declare(std::vector<uint32_t> order);
  /// The layer is acquired. Returns the one that was expected where that is another one.
  std::optional<uint32_t> visit(uint32_t layer);
  void end_step();
  /// The next acquires of this step, `count` at most; guesses while the first step is recorded.
  std::vector<uint32_t> next(uint32_t count) const;

 private:
  uint32_t layers_;
  std::vector<uint32_t> order_;  ///< being recorded until known_
  bool known_ = false;
  size_t position_ = 0;
};

}  // namespace overspill
