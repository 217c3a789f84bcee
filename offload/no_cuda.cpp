// What a build without CUDA knows of GPUs: that it cannot use them.
#include "engine/base/error.h"
#include "offload/cuda_device.h"

namespace overspill {
namespace {

constexpr const char* kAbsence =
    "this build has no CUDA; build on a machine with CUDA's headers, or with -DOVERSPILL_CUDA=ON";

}  // namespace

CudaGpus cuda_devices() { return {.gpus = {}, .absence = kAbsence}; }

uint32_t gpu_of_local_rank(uint32_t local_rank) {
  fail(ErrorCode::not_found, "no GPU for local rank {}: {}", local_rank, kAbsence);
}

void use_gpu(uint32_t gpu) { fail(ErrorCode::not_found, "no GPU {}: {}", gpu, kAbsence); }

GpuMemory gpu_memory(uint32_t gpu) { fail(ErrorCode::not_found, "no GPU {}: {}", gpu, kAbsence); }

PinnedMemory::PinnedMemory(std::span<std::byte>, uint32_t gpu) {
  fail(ErrorCode::not_found, "no GPU {}: {}", gpu, kAbsence);
}

PinnedMemory::~PinnedMemory() = default;

GpuScope::GpuScope(bool) {}
GpuScope::~GpuScope() = default;

std::unique_ptr<CudaDevice> make_cuda_device(uint64_t, uint32_t gpu) {
  fail(ErrorCode::not_found, "no GPU {}: {}", gpu, kAbsence);
}

}  // namespace overspill
