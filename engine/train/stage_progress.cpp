// Progress of loading and saving.
#include "engine/train/stage_progress.h"

#include "engine/base/error.h"
#include "engine/base/log.h"
#include "engine/base/units.h"
#include "engine/train/progress_scope.h"

namespace overspill {
namespace {

constexpr auto kInterval = std::chrono::seconds(5);

thread_local const ProgressObserver* thread_observer = nullptr;

}  // namespace

ProgressScope::ProgressScope(const ProgressObserver* observer) : outer_(thread_observer) {
  if (observer != nullptr) thread_observer = observer;
}

ProgressScope::~ProgressScope() { thread_observer = outer_; }

const ProgressObserver* ProgressScope::current() { return thread_observer; }

StageProgress::StageProgress(std::string what, uint64_t total_bytes)
    : what_(std::move(what)), total_bytes_(total_bytes), start_(Clock::now()), reported_(start_) {}

StageProgress::~StageProgress() {
  const double seconds = std::chrono::duration<double>(Clock::now() - start_).count();
  if (seconds < 1.0 || done_bytes_ < total_bytes_) return;
  log_info("{}: {} in {} ({})", what_, format_bytes(done_bytes_), format_seconds(seconds),
           format_rate(static_cast<double>(done_bytes_) / seconds));
}

void StageProgress::add(uint64_t bytes) {
  done_bytes_ += bytes;
  const double fraction = static_cast<double>(done_bytes_) / static_cast<double>(total_bytes_);
  const ProgressObserver* observer = ProgressScope::current();
  if (observer != nullptr && !(*observer)(what_, fraction)) {
    fail(ErrorCode::cancelled, "{}: stopped at {:.0f} %, as the caller wished", what_,
         100 * fraction);
  }
  const auto now = Clock::now();
  if (now - reported_ < kInterval || done_bytes_ >= total_bytes_) return;
  reported_ = now;
  log_info("{}: {:.0f} % of {}", what_, 100.0 * fraction, format_bytes(total_bytes_));
}

}  // namespace overspill
