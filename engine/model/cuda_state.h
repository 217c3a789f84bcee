// The maths of state on a GPU, with the host's bits.
#pragma once

#include <cuda_runtime_api.h>

#include "engine/model/cuda_scratch.h"
#include "engine/model/layers.h"
#include "engine/model/state_math.h"
#include "offload/cuda_device.h"

namespace overspill::cuda {

class CudaStateMath final : public StateMath {
 public:
  explicit CudaStateMath(const ModelShape& model);

  uint64_t scratch_bytes() const override { return scratch_.bytes; }
  void attach(Device& device, std::byte* scratch) override;
  void square_sum(uint32_t layer, const float* sums, uint64_t begin, uint64_t end,
                  double* total) const override;
  void factored_sums(const float* sums, uint64_t begin, uint64_t end, const FactoredMatrix& matrix,
                     const FactoredMoments& moments) const override;
  void round_gradient(const float* sums, uint16_t* gradient, uint64_t size) const override;
  void update(const OptimizerSettings& settings, const UpdateStep& step, const UpdateChunk& chunk,
              std::span<const UpdateRun> runs, bool moments_zero) const override;
  void add_gradient(void* stream, const void* gradient, DType type, float* sums, uint64_t size,
                    bool first) const override;

 private:
  cudaStream_t stream() const;
  uint64_t workspace_bytes() const;
  const float* fetch_averages(const float* averages, std::span<const UpdateRun> runs) const;

  const ModelShape model_;
  CudaDevice* device_ = nullptr;
  CudaStateScratch scratch_;
};

}  // namespace overspill::cuda
