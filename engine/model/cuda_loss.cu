// Cross-entropy of a chunk of tokens with its gradient in place, a block per token: one pass for a
// running maximum and sum (Milakov and Gimelshein 2018), one for the gradient.
#include "engine/base/cuda_vector.h"
#include "engine/model/cuda_kernels.h"

namespace overspill::cuda {
namespace {

constexpr int kThreads = 512;

template <int kWidth, class T>
__global__ void __launch_bounds__(kThreads)
    cross_entropy_row(T* logits, const int32_t* targets, float scale, float* loss,
                      uint64_t vocabulary) {
  T* const row = logits + blockIdx.x * vocabulary;
  if (targets[blockIdx.x] == kNotTrained) {  // of the whole block
    if (threadIdx.x == 0) loss[blockIdx.x] = 0.0f;
    if (scale == 0.0f) return;
    const float zeros[kWidth] = {};
    for (uint64_t i = threadIdx.x * kWidth; i < vocabulary; i += kThreads * kWidth) {
      store<kWidth>(zeros, row + i);
    }
    return;
  }
  const auto target = static_cast<uint64_t>(targets[blockIdx.x]);
  const float target_logit = threadIdx.x == 0 ? to_float(row[target]) : 0.0f;
  float maximum = -INFINITY, sum = 0;
  for (uint64_t i = threadIdx.x * kWidth; i < vocabulary; i += kThreads * kWidth) {
    float x[kWidth];
    load<kWidth>(row + i, x);
    float next = maximum;
    for (int j = 0; j < kWidth; ++j) next = fmaxf(next, x[j]);
    const float shift = next == -INFINITY ? 0.0f : next;  // inf - inf would be NaN
    if (next != maximum) sum *= expf(maximum - next);
    for (int j = 0; j < kWidth; ++j) sum += expf(x[j] - shift);
    maximum = next;
  }
  const float row_maximum = block_max<kThreads>(maximum);
  if (maximum != -INFINITY) sum *= expf(maximum - row_maximum);
  const float row_sum = block_sum<kThreads>(sum);
  // The difference first: it is exact for near logits, however large both are.
  if (threadIdx.x == 0) loss[blockIdx.x] = logf(row_sum) + (row_maximum - target_logit);
  if (scale == 0.0f) return;
  const float factor = scale / row_sum;
  for (uint64_t i = threadIdx.x * kWidth; i < vocabulary; i += kThreads * kWidth) {
    float x[kWidth];
    load<kWidth>(row + i, x);
    for (int j = 0; j < kWidth; ++j) {
      x[j] = expf(x[j] - row_maximum) * factor - (i + j == target ? scale : 0.0f);
    }
    store<kWidth>(x, row + i);
  }
}

}  // namespace

template <class T>
void cross_entropy(cudaStream_t stream, T* logits, const int32_t* targets, float scale, float* loss,
                   uint64_t rows, uint64_t vocabulary) {
  if (vocabulary % kPack == 0 && aligned(logits)) {
    OVERSPILL_LAUNCH((cross_entropy_row<kPack, T>), blocks_x(rows), kThreads, 0, stream, logits,
                     targets, scale, loss, vocabulary);
  } else {
    OVERSPILL_LAUNCH((cross_entropy_row<1, T>), blocks_x(rows), kThreads, 0, stream, logits,
                     targets, scale, loss, vocabulary);
  }
}

template void cross_entropy(cudaStream_t, float*, const int32_t*, float, float*, uint64_t,
                            uint64_t);
template void cross_entropy(cudaStream_t, bf16*, const int32_t*, float, float*, uint64_t, uint64_t);

}  // namespace overspill::cuda
