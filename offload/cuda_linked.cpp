// One runtime for everything: streams and events are made by the one that launches the kernels.
#include "offload/cuda_linked.h"

#include "offload/cuda_library.h"

namespace overspill {

const CudaLibrary* linked_cuda_library() {
  static const CudaLibrary library = [] {
    CudaLibrary linked;
#define OVERSPILL_CUDA_LINKED(name) linked.name = &::name;
    OVERSPILL_CUDA_FUNCTIONS(OVERSPILL_CUDA_LINKED)
#undef OVERSPILL_CUDA_LINKED
    return linked;
  }();
  return &library;
}

}  // namespace overspill
