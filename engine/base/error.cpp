// Names of error codes, errno texts, and the end of a failed CHECK.
#include "engine/base/error.h"

#include <cstdio>
#include <cstdlib>
#include <system_error>

namespace overspill {

const char* error_code_name(ErrorCode code) {
  switch (code) {
    case ErrorCode::invalid_config: return "invalid_config";
    case ErrorCode::invalid_file: return "invalid_file";
    case ErrorCode::not_found: return "not_found";
    case ErrorCode::does_not_fit: return "does_not_fit";
    case ErrorCode::io: return "io";
    case ErrorCode::non_finite: return "non_finite";
    case ErrorCode::rank_lost: return "rank_lost";
    case ErrorCode::cancelled: return "cancelled";
    case ErrorCode::internal: return "internal";
  }
  return "unknown";
}

std::string errno_text(int error) { return std::generic_category().message(error); }

void check_failed(const char* expression, const char* file, int line) {
  std::fprintf(stderr, "overspill: CHECK(%s) failed at %s:%d; this is a bug, please report it\n",
               expression, file, line);
  std::abort();
}

}  // namespace overspill
