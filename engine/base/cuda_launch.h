// How launchers report a kernel that could not start, without a CUDA header. Thread-safe.
#pragma once

namespace overspill::cuda {

/// Throws Error(internal): shapes and launch sizes are the engine's own.
[[noreturn]] void launch_failed(const char* kernel, const char* reason);

}  // namespace overspill::cuda
