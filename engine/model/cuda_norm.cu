// RMSNorm and its gradient, a block per row; the weight's gradient as sums over parts of the rows,
// then over the parts.
#include "engine/base/cuda_vector.h"
#include "engine/model/cuda_kernels.h"

namespace overspill::cuda {
namespace {

/// Of a block; short rows take one warp.
constexpr int kManyThreads = 256, kFewThreads = 32;
constexpr bool is_short(uint64_t d) { return d <= 512; }

template <class T>
struct Forward {
  const T *x, *w;
  float eps;
  T* y;
  float* rstd;
  uint64_t d;
};

template <int kThreads, int kWidth, class T>
__global__ void __launch_bounds__(kThreads) norm_row(Forward<T> a) {
  const uint64_t first = blockIdx.x * a.d;
  const T* x = a.x + first;
  float squares = 0;
  for (uint64_t i = threadIdx.x * kWidth; i < a.d; i += kThreads * kWidth) {
    float value[kWidth];
    load<kWidth>(x + i, value);
    for (int j = 0; j < kWidth; ++j) squares += value[j] * value[j];
  }
  const float mean = block_sum<kThreads>(squares) / static_cast<float>(a.d);
  const float rstd = 1.0f / sqrtf(mean + a.eps);
  if (threadIdx.x == 0) a.rstd[blockIdx.x] = rstd;
  for (uint64_t i = threadIdx.x * kWidth; i < a.d; i += kThreads * kWidth) {
    float value[kWidth], w[kWidth];
    load<kWidth>(x + i, value);
    load<kWidth>(a.w + i, w);
    for (int j = 0; j < kWidth; ++j) value[j] = value[j] * rstd * w[j];
    store<kWidth>(value, a.y + first + i);
  }
}

template <class T>
struct Backward {
  const T *x, *w;
  const float* rstd;
  const T* dy;
  T* dx;
  float* partial;  ///< [parts, d]; null without dw
  bool accumulate_dx;
  uint64_t rows, d;
};

/// Columns whose sums a block holds in shared memory; wider rows sum in `partial` itself.
constexpr uint64_t kSharedColumns = 12000;
constexpr uint64_t kMaxParts = 512, kPartRows = 8;

constexpr uint64_t parts_of(uint64_t rows) {
  const uint64_t parts = ceil_div(rows, kPartRows);
  return parts < kMaxParts ? parts : kMaxParts;
}

/// A block takes every gridDim.x-th row. A thread's columns are the same in every row, so that sums
/// over rows are its own.
template <int kThreads, int kWidth, class T>
__global__ void __launch_bounds__(kThreads) norm_gradient_rows(Backward<T> a) {
  OVERSPILL_DYNAMIC_SHARED(float, shared_sums);
  float* const partial = a.partial + blockIdx.x * a.d;
  float* const sums = a.d <= kSharedColumns ? shared_sums : partial;
  const float zero[kWidth] = {};
  if (a.partial != nullptr) {
    for (uint64_t i = threadIdx.x * kWidth; i < a.d; i += kThreads * kWidth) {
      store<kWidth>(zero, sums + i);
    }
  }
  for (uint64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const T* x = a.x + row * a.d;
    const T* dy = a.dy + row * a.d;
    T* dx = a.dx + row * a.d;
    const float rstd = a.rstd[row];
    float dot = 0;
    for (uint64_t i = threadIdx.x * kWidth; i < a.d; i += kThreads * kWidth) {
      float value[kWidth], w[kWidth], dout[kWidth];
      load<kWidth>(x + i, value);
      load<kWidth>(a.w + i, w);
      load<kWidth>(dy + i, dout);
      for (int j = 0; j < kWidth; ++j) dot += dout[j] * value[j] * w[j];
    }
    const float c = block_sum<kThreads>(dot) * rstd * rstd * rstd / static_cast<float>(a.d);
    for (uint64_t i = threadIdx.x * kWidth; i < a.d; i += kThreads * kWidth) {
      float value[kWidth], w[kWidth], dout[kWidth], din[kWidth] = {};
      load<kWidth>(x + i, value);
      load<kWidth>(a.w + i, w);
      load<kWidth>(dy + i, dout);
      if (a.accumulate_dx) load<kWidth>(dx + i, din);
      for (int j = 0; j < kWidth; ++j) din[j] += rstd * w[j] * dout[j] - c * value[j];
      store<kWidth>(din, dx + i);
      if (a.partial == nullptr) continue;
      float sum[kWidth];
      load<kWidth>(sums + i, sum);
      for (int j = 0; j < kWidth; ++j) sum[j] += dout[j] * value[j] * rstd;
      store<kWidth>(sum, sums + i);
    }
  }
  if (a.partial == nullptr || sums == partial) return;
  for (uint64_t i = threadIdx.x * kWidth; i < a.d; i += kThreads * kWidth) {
    float sum[kWidth];
    load<kWidth>(sums + i, sum);
    store<kWidth>(sum, partial + i);
  }
}

struct PartSums {
  const float* partial;
  uint64_t parts, d;
  float* dw;
  bool accumulate;
  template <int kWidth>
  __device__ void at(uint64_t i) const {
    float sum[kWidth] = {};
    for (uint64_t p = 0; p < parts; ++p) {
      float value[kWidth];
      load<kWidth>(partial + p * d + i, value);
      for (int j = 0; j < kWidth; ++j) sum[j] += value[j];
    }
    for (int j = 0; j < kWidth; ++j) dw[i + j] = accumulate ? dw[i + j] + sum[j] : sum[j];
  }
};

template <int kThreads, class T>
void launch_forward(cudaStream_t stream, const Forward<T>& a, uint64_t rows) {
  const bool vector = a.d % kPack == 0 && aligned(a.x, a.w, a.y);
  if (vector) {
    OVERSPILL_LAUNCH((norm_row<kThreads, kPack, T>), blocks_x(rows), kThreads, 0, stream, a);
  } else {
    OVERSPILL_LAUNCH((norm_row<kThreads, 1, T>), blocks_x(rows), kThreads, 0, stream, a);
  }
}

template <class T>
void launch_forward(cudaStream_t stream, const Forward<T>& a, uint64_t rows) {
  is_short(a.d) ? launch_forward<kFewThreads>(stream, a, rows)
                : launch_forward<kManyThreads>(stream, a, rows);
}

template <int kThreads, class T>
void launch_backward(cudaStream_t stream, const Backward<T>& a, uint64_t parts) {
  const size_t shared_bytes =
      a.partial == nullptr || a.d > kSharedColumns ? 0 : a.d * sizeof(float);
  if (a.d % kPack == 0 && aligned(a.x, a.w, a.dy, a.dx, a.partial)) {
    OVERSPILL_LAUNCH((norm_gradient_rows<kThreads, kPack, T>), blocks_x(parts), kThreads,
                     shared_bytes, stream, a);
  } else {
    OVERSPILL_LAUNCH((norm_gradient_rows<kThreads, 1, T>), blocks_x(parts), kThreads, shared_bytes,
                     stream, a);
  }
}

}  // namespace

template <class T>
void rms_norm(cudaStream_t stream, const T* x, const T* w, float eps, T* y, float* rstd,
              uint64_t rows, uint64_t d) {
  launch_forward(stream, Forward<T>{x, w, eps, y, rstd, d}, rows);
}

uint64_t rms_norm_gradient_workspace_bytes(uint64_t rows, uint64_t d) {
  return parts_of(rows) * d * sizeof(float);
}

template <class T>
void rms_norm_gradient(cudaStream_t stream, const T* x, const T* w, const float* rstd, const T* dy,
                       T* dx, float* dw, void* workspace, const NormGradientOptions& options,
                       uint64_t rows, uint64_t d) {
  float* partial = dw == nullptr ? nullptr : static_cast<float*>(workspace);
  const Backward<T> a{x, w, rstd, dy, dx, partial, options.accumulate_dx, rows, d};
  const uint64_t parts = dw == nullptr ? rows : parts_of(rows);
  is_short(d) ? launch_backward<kFewThreads>(stream, a, parts)
              : launch_backward<kManyThreads>(stream, a, parts);
  if (dw == nullptr) return;
  launch_elementwise(stream, PartSums{partial, parts, d, dw, options.accumulate_dw}, 0, d, false);
}

#define INSTANTIATE(T)                                                                             \
  template void rms_norm(cudaStream_t, const T*, const T*, float, T*, float*, uint64_t, uint64_t); \
  template void rms_norm_gradient(cudaStream_t, const T*, const T*, const float*, const T*, T*,    \
                                  float*, void*, const NormGradientOptions&, uint64_t, uint64_t);
INSTANTIATE(float)
INSTANTIATE(bf16)

}  // namespace overspill::cuda
