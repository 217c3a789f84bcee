// Statuses of CUDA calls as Errors that say what was being done. For files built only with CUDA.
#pragma once

#include <fmt/format.h>

#include <string>
#include <utility>

#include "offload/cuda_library.h"

namespace overspill {

/// Whether the error is sticky: the GPU's context is lost, and every later call of this process
/// fails.
bool cuda_error_is_sticky(cudaError_t status);

/// Throws Error(io): "cannot <doing>: <CUDA's name>: <CUDA's text>" and what to do.
[[noreturn]] void cuda_fail(const CudaLibrary& cuda, cudaError_t status, const std::string& doing);

/// Throws as cuda_fail unless the status is success. The text completes "cannot ...".
template <class... Args>
void cuda_check(const CudaLibrary& cuda, cudaError_t status, fmt::format_string<Args...> doing,
                Args&&... args) {
  if (status == cudaSuccess) return;
  cuda_fail(cuda, status, fmt::format(doing, std::forward<Args>(args)...));
}

}  // namespace overspill
