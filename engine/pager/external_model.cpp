// The maths of state on the host.
#include "engine/pager/external_model.h"

#include "engine/base/error.h"
#include "engine/model/factored_sums.h"
#include "engine/model/trained_squares.h"

namespace overspill {
namespace {

constexpr bool kComputesLayers = false;

}  // namespace

void ExternalModel::embed(const void*, const int32_t*, void*) const { CHECK(kComputesLayers); }
void ExternalModel::embed_backward(const int32_t*, const void*, float*, bool) const {
  CHECK(kComputesLayers);
}
void ExternalModel::block(uint32_t, const void*, const int32_t*, const void*, void*) const {
  CHECK(kComputesLayers);
}
void ExternalModel::block_backward(uint32_t, const void*, const int32_t*, const void*, void*,
                                   float*, bool) const {
  CHECK(kComputesLayers);
}
void ExternalModel::loss(const Head&, const void*, const int32_t*, float, void*, double*) const {
  CHECK(kComputesLayers);
}

void ExternalModel::square_sum(uint32_t layer, const float* sums, uint64_t begin, uint64_t end,
                               double* total) const {
  *total = trained_squares(kernels_, model_.layers[layer], sums, begin, end);
}

void ExternalModel::factored_sums(const float* sums, uint64_t begin, uint64_t end,
                                  const FactoredMatrix& matrix,
                                  const FactoredMoments& moments) const {
  add_part_squares(kernels_, sums, begin, end, matrix, moments);
}

void ExternalModel::round_gradient(const float* sums, uint16_t* gradient, uint64_t size) const {
  kernels_.float_to_bf16(sums, gradient, size);
}

void ExternalModel::update(const OptimizerSettings& settings, const UpdateStep& step,
                           const UpdateChunk& chunk, std::span<const UpdateRun> runs,
                           bool moments_zero) const {
  update_chunk(settings, step, chunk, runs, moments_zero);
}

}  // namespace overspill
