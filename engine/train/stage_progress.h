// Says how far a long pass over all pages (loading, saving) has come: a log line every few seconds,
// and one at the end when it took long. One thread.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace overspill {

class StageProgress {
 public:
  /// `what` reads well before a size: "loading weights".
  StageProgress(std::string what, uint64_t total_bytes);
  ~StageProgress();
  void add(uint64_t bytes);

 private:
  using Clock = std::chrono::steady_clock;
  std::string what_;
  uint64_t total_bytes_, done_bytes_ = 0;
  Clock::time_point start_, reported_;
};

}  // namespace overspill
