// Exceptions end here: a call's body becomes a status and the thread's last error.
#pragma once

#include <functional>

#include "bindings/include/overspill.h"

namespace overspill {

/// Runs the body; what it throws becomes a status, its text osp_last_error's.
osp_status_t guarded(const std::function<void()>& body);

}  // namespace overspill
