// A build without CUDA has no devices whose stream this could be.
#include "engine/base/error.h"
#include "engine/collective/cuda_nccl_stream.h"

namespace overspill {

std::unique_ptr<NcclStream> make_cuda_nccl_stream(CudaDevice& device, const CudaReductionKernels&) {
  fail(ErrorCode::not_found, "no stream on GPU {}: this build has no CUDA", device.gpu());
}

}  // namespace overspill
