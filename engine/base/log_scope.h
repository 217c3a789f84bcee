// Sends the log lines of a thread somewhere else than to stderr while it lives.
#pragma once

#include <functional>
#include <string>

#include "engine/base/log.h"

namespace overspill {

using LogSink = std::function<void(LogLevel, const std::string&)>;

class LogScope {
 public:
  /// `sink` outlives the scope; null: as it is.
  explicit LogScope(const LogSink* sink);
  ~LogScope();
  LogScope(const LogScope&) = delete;
  LogScope& operator=(const LogScope&) = delete;

 private:
  const LogSink* outer_;
};

}  // namespace overspill
