// metrics.jsonl and the progress line. Floating-point numbers are written so that they read back to
// the same bits. One thread.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>

#include "engine/base/fd.h"
#include "engine/run/trace.h"

namespace overspill {

/// One object a line, flushed to the file at once. A resumed run keeps the lines up to its step.
class MetricsFile {
 public:
  MetricsFile(const std::filesystem::path& path, uint64_t resumed_step);
  void write(const nlohmann::json& object);

 private:
  Fd file_;
  uint64_t size_ = 0;
};

/// {"nvme_read": value, ...} over the lanes whose value is not zero.
nlohmann::json lane_object(const std::array<double, kLanes>& values);
nlohmann::json lane_object(const std::array<uint64_t, kLanes>& values);

/// Highest resident set of this process, in bytes (VmHWM).
uint64_t peak_resident_bytes();

/// A line rewritten in place on a terminal, plain lines otherwise; on stdout.
class Progress {
 public:
  Progress(uint64_t total_steps, uint32_t logging_steps);
  ~Progress();
  struct Step {
    uint64_t step;
    double loss, grad_norm, learning_rate, tokens_per_second, seconds;
    double light_seconds;  ///< what no schedule could beat; 0: not known
  };
  void step(const Step& step);
  /// A line of its own.
  void note(const std::string& text);

 private:
  uint64_t total_steps_;
  uint32_t logging_steps_;
  bool terminal_;
  bool line_open_ = false;
};

}  // namespace overspill
