// A function on a stack of its own that gives up the processor by itself: what a CUDA thread is in
// the emulation. x86-64. Tells AddressSanitizer and ThreadSanitizer of every switch. One OS thread
// at a time.
#pragma once

#include <cstddef>

namespace overspill::emulation {

/// Where a flow of control stands while another runs.
struct FiberContext {
  void* stack_pointer = nullptr;
  const void* stack = nullptr;  ///< AddressSanitizer's bounds
  size_t stack_bytes = 0;
  void* fake_stack = nullptr;    ///< AddressSanitizer's
  void* thread_state = nullptr;  ///< ThreadSanitizer's
};

class Fiber {
 public:
  /// `body` never returns; it runs from the first resume on.
  explicit Fiber(void (*body)());
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  /// Called by `from`, the scheduler: runs until suspend.
  void resume(FiberContext& from);
  /// Called in the fiber: back to the scheduler.
  void suspend(FiberContext& to);
  /// Called first in the fiber's body.
  static void started(FiberContext& scheduler);

 private:
  char* memory_;
  FiberContext context_;
};

/// ThreadSanitizer's view of an ordering; nothing elsewhere.
void happens_before(void* object);
void happens_after(void* object);
/// Under ThreadSanitizer every CUDA thread needs a fiber of its own.
bool fibers_are_threads();

}  // namespace overspill::emulation
