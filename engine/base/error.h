// The one exception type and the check for programmers' errors.
// A message says what, which, where, why and what to do next. Thread-safe: no state.
#pragma once

#include <fmt/format.h>

#include <stdexcept>
#include <string>
#include <utility>

namespace overspill {

enum class ErrorCode {
  invalid_config,  ///< a key or value the user wrote
  invalid_file,    ///< a file whose content is not what its format demands
  not_found,       ///< a path that does not exist
  does_not_fit,    ///< a budget is too small for the run
  io,              ///< the operating system refused or broke an I/O operation
  non_finite,      ///< too many non-finite losses or gradients in a row
  rank_lost,       ///< another rank is gone, or does not take part
  cancelled,       ///< stopped on request
  internal,        ///< a bug
};

/// Stable lower-case name of a code, as printed before a message.
const char* error_code_name(ErrorCode code);

class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  ErrorCode code() const { return code_; }

 private:
  ErrorCode code_;
};

/// Throws Error with a formatted message.
template <class... Args>
[[noreturn]] void fail(ErrorCode code, fmt::format_string<Args...> text, Args&&... args) {
  throw Error(code, fmt::format(text, std::forward<Args>(args)...));
}

/// "No space left on device" for ENOSPC; thread-safe.
std::string errno_text(int error);

[[noreturn]] void check_failed(const char* expression, const char* file, int line);

}  // namespace overspill

/// A programmer's error: on in release builds, prints the expression and aborts.
#define CHECK(expression) \
  ((expression) ? (void)0 : ::overspill::check_failed(#expression, __FILE__, __LINE__))
