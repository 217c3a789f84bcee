// Tells someone how far the long passes of a thread have come (stage_progress.h) while it lives.
#pragma once

#include <functional>
#include <string>

namespace overspill {

/// What is being done, and from 0 to 1 how far it has come. False ends it: Error(cancelled).
using ProgressObserver = std::function<bool(const std::string& what, double fraction)>;

class ProgressScope {
 public:
  /// `observer` outlives the scope; null: as it is.
  explicit ProgressScope(const ProgressObserver* observer);
  ~ProgressScope();
  ProgressScope(const ProgressScope&) = delete;
  ProgressScope& operator=(const ProgressScope&) = delete;

  /// The calling thread's; null where there is none.
  static const ProgressObserver* current();

 private:
  const ProgressObserver* outer_;
};

}  // namespace overspill
