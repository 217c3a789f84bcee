// A position in a list.
#include "engine/pager/access_order.h"

#include <algorithm>

namespace overspill {
namespace {

/// Of a step's acquires; a program that never ends a step has no order.
constexpr size_t kMostRemembered = 1 << 20;

}  // namespace

void AccessOrder::declare(std::vector<uint32_t> order) {
  order_ = std::move(order);
  known_ = declared_ = true;
  position_ = 0;
}

std::optional<uint32_t> AccessOrder::visit(uint32_t layer) {
  if (visited_.size() < kMostRemembered) visited_.push_back(layer);
  if (!known_) return std::nullopt;
  if (position_ < order_.size() && order_[position_] == layer) {
    ++position_;
    return std::nullopt;
  }
  deviated_ = true;
  const uint32_t expected = order_[std::min(position_, order_.size() - 1)];
  // Goes on behind the layer's next turn, wherever in the step that is.
  const auto at = order_.begin() + static_cast<ptrdiff_t>(std::min(position_, order_.size()));
  auto found = std::find(at, order_.end(), layer);
  if (found == order_.end()) found = std::find(order_.begin(), order_.end(), layer);
  if (found != order_.end()) position_ = static_cast<size_t>(found - order_.begin()) + 1;
  return expected;
}

void AccessOrder::end_step() {
  const bool whole = !visited_.empty() && visited_.size() < kMostRemembered;
  if (whole && !declared_ && (!known_ || deviated_)) {
    order_ = visited_;
    known_ = true;
  }
  restart();
}

void AccessOrder::restart() {
  visited_.clear();
  deviated_ = false;
  position_ = 0;
}

std::vector<uint32_t> AccessOrder::next(uint32_t count) const {
  std::vector<uint32_t> coming;
  if (known_) {
    for (size_t i = position_; i < order_.size() && coming.size() < count; ++i) {
      coming.push_back(order_[i]);
    }
    return coming;
  }
  // The forward goes up, the backward down.
  const bool down = visited_.size() > 1 && visited_.back() < visited_[visited_.size() - 2];
  int64_t layer = visited_.empty() ? -1 : int64_t{visited_.back()};
  for (uint32_t i = 0; i < count; ++i) {
    layer += down ? -1 : 1;
    if (layer < 0 || layer >= layers_) break;
    coming.push_back(static_cast<uint32_t>(layer));
  }
  return coming;
}

}  // namespace overspill
