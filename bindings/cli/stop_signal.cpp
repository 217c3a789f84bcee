// The process's one flag, set in the handler.
#include "bindings/cli/stop_signal.h"

#include <time.h>

#include <csignal>
#include <cstdint>

namespace overspill {
namespace {

constexpr int64_t kSecond = 1'000'000'000;
/// A request may come twice at once: to all processes of a job, and from their launcher.
constexpr int64_t kSameRequest = 2 * kSecond;

std::atomic<bool> stop_requested{false};
std::atomic<int64_t> first_request_ns{0};
static_assert(std::atomic<int64_t>::is_always_lock_free, "used in a signal handler");

extern "C" void request_stop(int signal) {
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC, &time);
  const int64_t now = time.tv_sec * kSecond + time.tv_nsec;
  int64_t first = 0;
  if (first_request_ns.compare_exchange_strong(first, now)) {
    stop_requested = true;
  } else if (now - first >= kSameRequest) {
    std::signal(signal, SIG_DFL);
    std::raise(signal);
  }
}

}  // namespace

const std::atomic<bool>& stop_on_signals() {
  std::signal(SIGINT, request_stop);
  std::signal(SIGTERM, request_stop);
  return stop_requested;
}

}  // namespace overspill
