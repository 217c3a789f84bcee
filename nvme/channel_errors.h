// What a failed request means: whether another try may help, its cause in words, and what to do.
// Pure functions; private to nvme.
#pragma once

#include <string>

#include "nvme/async_io.h"

namespace overspill {

bool may_pass(int error);
/// "Input/output error", "end of file".
std::string failure_cause(const IoRequest& request, const IoResult& result);
/// What to do before resuming.
const char* failure_cure(const IoRequest& request, const IoResult& result);

}  // namespace overspill
