// A model whose layers another program computes: only the maths of their state is here. The
// executor never asks for the rest, because no Program of the pager's has such ops.
#pragma once

#include "engine/model/kernels.h"
#include "engine/model/layers.h"
#include "engine/model/model.h"

namespace overspill {

class ExternalModel final : public Model {
 public:
  explicit ExternalModel(const ModelShape& model) : model_(model) {}

  uint64_t scratch_bytes() const override { return 0; }
  DType activation_type() const override { return DType::f32; }
  void attach(Device&, std::byte*) override {}

  void embed(const void*, const int32_t*, void*) const override;
  void embed_backward(const int32_t*, const void*, float*, bool) const override;
  void block(uint32_t, const void*, const int32_t*, const void*, void*) const override;
  void block_backward(uint32_t, const void*, const int32_t*, const void*, void*, float*,
                      bool) const override;
  void loss(const Head&, const void*, const int32_t*, float, void*, double*) const override;

  void square_sum(uint32_t layer, const float* sums, uint64_t begin, uint64_t end,
                  double* total) const override;
  void factored_sums(const float* sums, uint64_t begin, uint64_t end, const FactoredMatrix& matrix,
                     const FactoredMoments& moments) const override;
  void round_gradient(const float* sums, uint16_t* gradient, uint64_t size) const override;
  void update(const OptimizerSettings& settings, const UpdateStep& step, const UpdateChunk& chunk,
              std::span<const UpdateRun> runs, bool moments_zero) const override;

 private:
  const ModelShape& model_;
  const Kernels& kernels_ = host_kernels();
};

}  // namespace overspill
