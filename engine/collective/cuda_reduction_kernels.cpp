// The model's kernels as the collectives' table.
#include "engine/collective/cuda_nccl_stream.h"
#include "engine/model/cuda_kernels.h"

namespace overspill {
namespace {

cudaStream_t on(void* stream) { return static_cast<cudaStream_t>(stream); }

__nv_bfloat16* bf16_at(uint16_t* memory) { return reinterpret_cast<__nv_bfloat16*>(memory); }
const __nv_bfloat16* bf16_at(const uint16_t* memory) {
  return reinterpret_cast<const __nv_bfloat16*>(memory);
}

}  // namespace

CudaReductionKernels cuda_reduction_kernels() {
  return {.float_to_bf16 =
              [](void* stream, const float* values, uint16_t* rounded, uint64_t count) {
                cuda::float_to_bf16(on(stream), values, bf16_at(rounded), count);
              },
          .bf16_to_float =
              [](void* stream, const uint16_t* rounded, float* values, uint64_t count) {
                cuda::bf16_to_float(on(stream), bf16_at(rounded), values, count);
              },
          .add = [](void* stream, const float* values, float* sum,
                    uint64_t count) { cuda::add(on(stream), values, sum, count); },
          .add_bf16 = [](void* stream, const uint16_t* values, float* sum,
                         uint64_t count) { cuda::add(on(stream), bf16_at(values), sum, count); }};
}

}  // namespace overspill
