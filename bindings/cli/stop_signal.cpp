// The process's one flag, set in the handler.
#include "bindings/cli/stop_signal.h"

#include <csignal>

namespace overspill {
namespace {

std::atomic<bool> stop_requested{false};

extern "C" void request_stop(int signal) {
  stop_requested = true;
  std::signal(signal, SIG_DFL);
}

}  // namespace

const std::atomic<bool>& stop_on_signals() {
  std::signal(SIGINT, request_stop);
  std::signal(SIGTERM, request_stop);
  return stop_requested;
}

}  // namespace overspill
