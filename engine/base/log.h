// Log lines on stderr, one level for the process. Thread-safe.
#pragma once

#include <fmt/format.h>

#include <string>
#include <utility>

namespace overspill {

enum class LogLevel { debug, info, warning, error, off };

void set_log_level(LogLevel level);
void write_log(LogLevel level, const std::string& message);

template <class... Args>
void log_debug(fmt::format_string<Args...> text, Args&&... args) {
  write_log(LogLevel::debug, fmt::format(text, std::forward<Args>(args)...));
}
template <class... Args>
void log_info(fmt::format_string<Args...> text, Args&&... args) {
  write_log(LogLevel::info, fmt::format(text, std::forward<Args>(args)...));
}
template <class... Args>
void log_warning(fmt::format_string<Args...> text, Args&&... args) {
  write_log(LogLevel::warning, fmt::format(text, std::forward<Args>(args)...));
}

}  // namespace overspill
