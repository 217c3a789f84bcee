// In place of what calls kernels where there is no nvcc to compile them.
#include "engine/base/error.h"
#include "engine/collective/cuda_nccl_stream.h"
#include "engine/model/cuda_model.h"

namespace overspill {

const char* cuda_model_absence() {
  return "this build has no kernels for GPUs: configure it with -DOVERSPILL_CUDA=ON on a machine "
         "with CUDA's compiler nvcc and its headers, or use offload.device: unified";
}

std::unique_ptr<Model> make_cuda_model(const ModelShape&, DType, const BatchShape&, uint32_t) {
  fail(ErrorCode::not_found, "offload.device: cuda: {}", cuda_model_absence());
}

std::unique_ptr<StateMath> make_cuda_state_math(const ModelShape&) {
  fail(ErrorCode::not_found, "offload.device: cuda: {}", cuda_model_absence());
}

CudaReductionKernels cuda_reduction_kernels() {
  fail(ErrorCode::not_found, "collective_backend: nccl: {}", cuda_model_absence());
}

}  // namespace overspill
