// What a program that pages its own layers may do wrong. Such a call has changed nothing.
#pragma once

#include <cstdint>
#include <string>

#include "engine/base/error.h"

namespace overspill {

enum class Misuse : uint8_t {
  bad_argument,
  not_finalized,
  already_finalized,
  unknown_tensor,
  duplicate_name,
  size_mismatch,
  dtype_mismatch,
  already_acquired,
  not_acquired,
  no_slot,
  layers_held,
  frozen,
  gradient_complete,
  gradient_missing,
  step_not_started,
  no_weights,
  unsupported,
};

class MisuseError : public Error {
 public:
  MisuseError(Misuse kind, const std::string& message)
      : Error(ErrorCode::invalid_config, message), kind_(kind) {}
  Misuse kind() const { return kind_; }

 private:
  Misuse kind_;
};

template <class... Args>
[[noreturn]] void refuse(Misuse kind, fmt::format_string<Args...> text, Args&&... args) {
  throw MisuseError(kind, fmt::format(text, std::forward<Args>(args)...));
}

}  // namespace overspill
