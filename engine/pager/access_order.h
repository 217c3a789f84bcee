// In which order a step acquires layers: declared, or that of the first step, and later of the last
// one that deviated. Says what comes next, and notices when the program does something else. One
// thread at a time.
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
  /// The step begins anew.
  void restart();
  /// The next acquires of this step, `count` at most; guesses while no order is known.
  std::vector<uint32_t> next(uint32_t count) const;

 private:
  uint32_t layers_;
  std::vector<uint32_t> order_;
  bool known_ = false, declared_ = false;
  size_t position_ = 0;
  std::vector<uint32_t> visited_;  ///< in this step, as far as it is remembered
  bool deviated_ = false;          ///< in this step
};

}  // namespace overspill
