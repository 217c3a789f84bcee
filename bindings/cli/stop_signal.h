// Ctrl-C and SIGTERM as a flag that long commands look at. A second one ends the process at once,
// unless it comes within 2 seconds: launchers pass on what may have reached all of their processes.
#pragma once

#include <atomic>

namespace overspill {

/// Takes both signals from now on; the flag is set by the first.
const std::atomic<bool>& stop_on_signals();

}  // namespace overspill
