// The CUDA runtime that nvcc's kernels are linked with.
#pragma once

namespace overspill {

struct CudaLibrary;

/// Null where the build has no such kernels; then, and where the environment's OVERSPILL_CUDART
/// names a file, the runtime is opened at run time.
const CudaLibrary* linked_cuda_library();

}  // namespace overspill
