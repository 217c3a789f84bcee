// Memory that code under test and its test both use: ordinary memory on the emulated GPU
// (test_memory.cpp), memory that CUDA moves to and fro on a real one (tests/gpu/gpu_memory.cpp).
#pragma once

#include <cstddef>

namespace overspill::test {

/// Whether these tests were built for a real GPU, with NVIDIA's own libraries.
#if defined(OVERSPILL_ON_GPU)
inline constexpr bool kOnGpu = true;
#else
inline constexpr bool kOnGpu = false;
#endif

/// Before the host looks at memory: waits for kernels, if any memory was given to them since the
/// last wait. What failed there fails the test.
void finish_kernels();
/// Memory may be given to kernels that are launched from now on.
void give_to_kernels();

/// Aligned to 256 bytes.
void* allocate_shared(size_t bytes);
void free_shared(void* memory);

}  // namespace overspill::test
