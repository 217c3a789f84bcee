// The process's logger: spdlog to stderr.
#include "engine/base/log.h"

#include "engine/base/log_scope.h"

#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>

namespace overspill {
namespace {

spdlog::logger& logger() {
  static const std::shared_ptr<spdlog::logger> instance = [] {
    auto made = spdlog::stderr_color_mt("overspill");
    made->set_pattern("%^%l%$: %v");
    return made;
  }();
  return *instance;
}

spdlog::level::level_enum to_spdlog(LogLevel level) {
  switch (level) {
    case LogLevel::debug: return spdlog::level::debug;
    case LogLevel::info: return spdlog::level::info;
    case LogLevel::warning: return spdlog::level::warn;
    case LogLevel::error: return spdlog::level::err;
    case LogLevel::off: return spdlog::level::off;
  }
  return spdlog::level::info;
}

thread_local const LogSink* thread_sink = nullptr;

}  // namespace

LogScope::LogScope(const LogSink* sink) : outer_(thread_sink) {
  if (sink != nullptr) thread_sink = sink;
}

LogScope::~LogScope() { thread_sink = outer_; }

void set_log_level(LogLevel level) { logger().set_level(to_spdlog(level)); }

void write_log(LogLevel level, const std::string& message) {
  if (thread_sink != nullptr) return (*thread_sink)(level, message);
  logger().log(to_spdlog(level), spdlog::string_view_t(message.data(), message.size()));
}

}  // namespace overspill
