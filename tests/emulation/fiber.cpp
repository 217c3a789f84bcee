// Stacks, the switch, and what the sanitizers must know. Compiled without instrumentation.
#include "tests/emulation/fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <new>

#if defined(OVERSPILL_EMULATION_ADDRESS)
#include <sanitizer/common_interface_defs.h>
#elif defined(OVERSPILL_EMULATION_THREAD)
#include <sanitizer/tsan_interface.h>
#endif

namespace overspill::emulation {
namespace {

constexpr size_t kGuardBytes = 4096;
constexpr size_t kStackBytes = 256 * 1024;  // touched pages alone take memory
constexpr int kSavedRegisters = 6;

/// Saves the registers that a call preserves, then continues where `to` was left.
__attribute__((naked, noinline)) void switch_stacks(void** /*from*/, void* /*to*/) {
  asm volatile(
      "pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
      "movq %rsp, (%rdi)\n movq %rsi, %rsp\n"
      "popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n ret");
}

void switch_contexts(FiberContext& from, FiberContext& to) {
#if defined(OVERSPILL_EMULATION_ADDRESS)
  __sanitizer_start_switch_fiber(&from.fake_stack, to.stack, to.stack_bytes);
#elif defined(OVERSPILL_EMULATION_THREAD)
  constexpr unsigned kNoOrdering = 1;
  __tsan_switch_to_fiber(to.thread_state, kNoOrdering);
#endif
  switch_stacks(&from.stack_pointer, to.stack_pointer);
}

}  // namespace

Fiber::Fiber(void (*body)()) {
  void* memory = mmap(nullptr, kGuardBytes + kStackBytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  memory_ = static_cast<char*>(memory);
  mprotect(memory_, kGuardBytes, PROT_NONE);
  context_.stack = memory_ + kGuardBytes;
  context_.stack_bytes = kStackBytes;
  // As if the body had been called: its address above the saved registers, and a null return
  // address above that, at which stacks end.
  auto* top = reinterpret_cast<uint64_t*>(memory_ + kGuardBytes + kStackBytes) - 8;
  *--top = 0;
  *--top = reinterpret_cast<uint64_t>(body);
  for (int i = 0; i < kSavedRegisters; ++i) *--top = 0;
  context_.stack_pointer = top;
#if defined(OVERSPILL_EMULATION_THREAD)
  context_.thread_state = __tsan_create_fiber(0);
#endif
}

Fiber::~Fiber() {
#if defined(OVERSPILL_EMULATION_THREAD)
  __tsan_destroy_fiber(context_.thread_state);
#endif
  munmap(memory_, kGuardBytes + kStackBytes);
}

void Fiber::resume(FiberContext& from) {
#if defined(OVERSPILL_EMULATION_THREAD)
  from.thread_state = __tsan_get_current_fiber();
#endif
  switch_contexts(from, context_);
#if defined(OVERSPILL_EMULATION_ADDRESS)
  __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
#endif
}

void Fiber::suspend(FiberContext& to) {
  switch_contexts(context_, to);
#if defined(OVERSPILL_EMULATION_ADDRESS)
  __sanitizer_finish_switch_fiber(context_.fake_stack, &to.stack, &to.stack_bytes);
#endif
}

void Fiber::started([[maybe_unused]] FiberContext& scheduler) {
#if defined(OVERSPILL_EMULATION_ADDRESS)
  __sanitizer_finish_switch_fiber(nullptr, &scheduler.stack, &scheduler.stack_bytes);
#endif
}

void happens_before([[maybe_unused]] void* object) {
#if defined(OVERSPILL_EMULATION_THREAD)
  __tsan_release(object);
#endif
}

void happens_after([[maybe_unused]] void* object) {
#if defined(OVERSPILL_EMULATION_THREAD)
  __tsan_acquire(object);
#endif
}

bool fibers_are_threads() {
#if defined(OVERSPILL_EMULATION_THREAD)
  return true;
#else
  return false;
#endif
}

}  // namespace overspill::emulation
