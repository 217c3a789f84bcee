// The error of a refused kernel launch.
#include "engine/base/cuda_launch.h"

#include "engine/base/error.h"

namespace overspill::cuda {

void launch_failed(const char* kernel, const char* reason) {
  fail(
      ErrorCode::internal,
      "start kernel {}: {}; the GPU may be lost, or too old for this build (compute capability 8.0 "
      "or later): run \"overspill info\"",
      kernel, reason);
}

}  // namespace overspill::cuda
