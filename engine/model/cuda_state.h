// What a GPU computes of a model's state, whatever its layers are: sums over gradients, and
// optimizer updates. Work is put on the compute stream.
#pragma once

#include <cuda_runtime_api.h>

#include "engine/model/cuda_scratch.h"
#include "engine/model/model.h"
#include "offload/cuda_device.h"

namespace overspill::cuda {

class CudaState : public Model {
 public:
  explicit CudaState(const ModelShape& model) : model_(model) {}

  void square_sum(uint32_t layer, const float* sums, uint64_t begin, uint64_t end,
                  double* total) const override;
  void factored_sums(const float* sums, uint64_t begin, uint64_t end, const FactoredMatrix& matrix,
                     const FactoredMoments& moments) const override;
  void round_gradient(const float* sums, uint16_t* gradient, uint64_t size) const override;
  void update(const OptimizerSettings& settings, const UpdateStep& step, const UpdateChunk& chunk,
              std::span<const UpdateRun> runs, bool moments_zero) const override;

 protected:
  cudaStream_t stream() const;
  /// Of the calls above.
  uint64_t state_workspace_bytes() const;
  /// scratch_.total, to the host.
  void give_total(double* total) const;

  const ModelShape model_;
  CudaDevice* device_ = nullptr;
  CudaScratch scratch_{};

 private:
  const float* fetch_averages(const float* averages, std::span<const UpdateRun> runs) const;
};

}  // namespace overspill::cuda
