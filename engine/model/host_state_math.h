// The maths of state on the host.
#pragma once

#include "engine/model/kernels.h"
#include "engine/model/layers.h"
#include "engine/model/state_math.h"

namespace overspill {

class HostStateMath final : public StateMath {
 public:
  HostStateMath(const ModelShape& model, const Kernels& kernels)
      : model_(model), kernels_(kernels) {}

  uint64_t scratch_bytes() const override { return 0; }
  void attach(Device&, std::byte*) override {}
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
  const ModelShape model_;
  const Kernels& kernels_;
};

}  // namespace overspill
