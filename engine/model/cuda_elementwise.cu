// Kernels that treat each element (or rotated pair) by itself.
#include "engine/base/cuda_vector.h"
#include "engine/model/cuda_kernels.h"

namespace overspill::cuda {
namespace {

template <class T>
struct Swiglu {
  const T *gate, *up;
  T* y;
  template <int kWidth>
  __device__ void at(uint64_t i) const {
    float g[kWidth], u[kWidth], out[kWidth];
    load<kWidth>(gate + i, g);
    load<kWidth>(up + i, u);
    for (int j = 0; j < kWidth; ++j) out[j] = g[j] / (1.0f + expf(-g[j])) * u[j];
    store<kWidth>(out, y + i);
  }
};

template <class T>
struct SwigluGradient {
  T *gate, *up;
  const T* dy;
  template <int kWidth>
  __device__ void at(uint64_t i) const {
    float g[kWidth], u[kWidth], d[kWidth];
    load<kWidth>(gate + i, g);
    load<kWidth>(up + i, u);
    load<kWidth>(dy + i, d);
    for (int j = 0; j < kWidth; ++j) {
      const float sigmoid = 1.0f / (1.0f + expf(-g[j]));
      const float slope = sigmoid * (1.0f + g[j] * (1.0f - sigmoid));
      u[j] = d[j] * u[j] * slope;
      g[j] = d[j] * g[j] * sigmoid;
    }
    store<kWidth>(u, gate + i);
    store<kWidth>(g, up + i);
  }
};

template <class X, class Y>
struct Add {
  const X* x;
  Y* y;
  template <int kWidth>
  __device__ void at(uint64_t i) const {
    float a[kWidth], b[kWidth];
    load<kWidth>(x + i, a);
    load<kWidth>(y + i, b);
    for (int j = 0; j < kWidth; ++j) b[j] += a[j];
    store<kWidth>(b, y + i);
  }
};

template <class X>
struct Accumulate {
  const X* x;
  float* sums;
  bool first;
  template <int kWidth>
  __device__ void at(uint64_t i) const {
    float a[kWidth], b[kWidth];
    load<kWidth>(x + i, a);
    if (!first) {
      load<kWidth>(sums + i, b);
      for (int j = 0; j < kWidth; ++j) a[j] = b[j] + a[j];
    }
    store<kWidth>(a, sums + i);
  }
};

template <class T>
struct Scale {
  T* x;
  float factor;
  template <int kWidth>
  __device__ void at(uint64_t i) const {
    float a[kWidth];
    load<kWidth>(x + i, a);
    for (int j = 0; j < kWidth; ++j) a[j] *= factor;
    store<kWidth>(a, x + i);
  }
};

template <class T>
struct Zero {
  T* x;
  template <int kWidth>
  __device__ void at(uint64_t i) const {
    const float zero[kWidth] = {};
    store<kWidth>(zero, x + i);
  }
};

template <class From, class To>
struct Convert {
  const From* from;
  To* to;
  template <int kWidth>
  __device__ void at(uint64_t i) const {
    float a[kWidth];
    load<kWidth>(from + i, a);
    store<kWidth>(a, to + i);
  }
};

constexpr int kFirstThreads = 1024;
constexpr uint64_t kFirstSize = uint64_t{kFirstThreads} * kPack;

/// The first elements in place: all are read before any is written.
__global__ void __launch_bounds__(kFirstThreads) narrow_first(float* memory, uint64_t size) {
  const uint64_t i = threadIdx.x * uint64_t{kPack};
  float a[kPack];
  for (uint64_t j = 0; j < kPack; ++j) a[j] = i + j < size ? memory[i + j] : 0.0f;
  block_barrier();
  bf16* to = reinterpret_cast<bf16*>(memory);
  for (uint64_t j = 0; j < kPack; ++j) {
    if (i + j < size) to[i + j] = __float2bfloat16_rn(a[j]);
  }
}

constexpr int kRotateThreads = 128;

/// A block is a token; x[tokens, heads, 2*half].
template <int kWidth, class T>
__global__ void __launch_bounds__(kRotateThreads)
    rotate_tokens(T* x, const float* table, uint64_t sequence_len, int heads, int half,
                  float sign) {
  const uint64_t token = blockIdx.x;
  const float* cosines = table + token % sequence_len * 2 * half;
  const float* sines = cosines + half;
  const int packs = half / kWidth;
  for (int i = threadIdx.x; i < heads * packs; i += kRotateThreads) {
    const int pair = i % packs * kWidth;
    T* first = x + (token * heads + i / packs) * 2 * half + pair;
    float a[kWidth], b[kWidth], c[kWidth], s[kWidth], turned_a[kWidth], turned_b[kWidth];
    load<kWidth>(first, a);
    load<kWidth>(first + half, b);
    load<kWidth>(cosines + pair, c);
    load<kWidth>(sines + pair, s);
    for (int j = 0; j < kWidth; ++j) {
      turned_a[j] = a[j] * c[j] - b[j] * (sign * s[j]);
      turned_b[j] = b[j] * c[j] + a[j] * (sign * s[j]);
    }
    store<kWidth>(turned_a, first);
    store<kWidth>(turned_b, first + half);
  }
}

constexpr int kDocumentThreads = 128;

/// A thread is a token. The first begin behind it that is another one is found by bisection.
__global__ void __launch_bounds__(kDocumentThreads)
    find_document_ends(const int32_t* begins, int32_t* ends, uint64_t tokens,
                       uint64_t sequence_len) {
  const uint64_t token = uint64_t{blockIdx.x} * kDocumentThreads + threadIdx.x;
  if (token >= tokens) return;
  const uint64_t sequence = token / sequence_len * sequence_len;
  uint64_t low = token + 1, high = sequence + sequence_len;
  while (low < high) {
    const uint64_t middle = low + (high - low) / 2;
    if (begins[middle] == begins[token]) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  ends[token] = static_cast<int32_t>(low - sequence);
}

}  // namespace

template <class T>
void swiglu(cudaStream_t stream, const T* gate, const T* up, T* y, uint64_t size) {
  launch_elementwise(stream, Swiglu<T>{gate, up, y}, 0, size, aligned(gate, up, y));
}

template <class T>
void swiglu_gradient(cudaStream_t stream, T* gate, T* up, const T* dy, uint64_t size) {
  launch_elementwise(stream, SwigluGradient<T>{gate, up, dy}, 0, size, aligned(gate, up, dy));
}

template <class X, class Y>
void add(cudaStream_t stream, const X* x, Y* y, uint64_t size) {
  launch_elementwise(stream, Add<X, Y>{x, y}, 0, size, aligned(x, y));
}

template <class X>
void accumulate(cudaStream_t stream, const X* x, float* sums, uint64_t size, bool first) {
  launch_elementwise(stream, Accumulate<X>{x, sums, first}, 0, size, aligned(x, sums));
}

template <class T>
void scale(cudaStream_t stream, T* x, float factor, uint64_t size) {
  launch_elementwise(stream, Scale<T>{x, factor}, 0, size, aligned(x));
}

template <class T>
void fill_zero(cudaStream_t stream, T* x, uint64_t size) {
  launch_elementwise(stream, Zero<T>{x}, 0, size, aligned(x));
}

void float_to_bf16(cudaStream_t stream, const float* src, bf16* dst, uint64_t size) {
  const Convert<float, bf16> convert{src, dst};
  if (static_cast<const void*>(src) != static_cast<const void*>(dst)) {
    return launch_elementwise(stream, convert, 0, size, aligned(src, dst));
  }
  if (size == 0) return;
  // The result of elements [n, 2n) lies over sources [n/2, n): each launch writes only over what
  // earlier ones have read.
  OVERSPILL_LAUNCH(narrow_first, 1, kFirstThreads, 0, stream, reinterpret_cast<float*>(dst),
                   size < kFirstSize ? size : kFirstSize);
  for (uint64_t begin = kFirstSize; begin < size; begin *= 2) {
    const uint64_t end = size - begin < begin ? size : 2 * begin;
    launch_elementwise(stream, convert, begin, end, aligned(src));
  }
}

void bf16_to_float(cudaStream_t stream, const bf16* src, float* dst, uint64_t size) {
  launch_elementwise(stream, Convert<bf16, float>{src, dst}, 0, size, aligned(src, dst));
}

template <class T>
void rotate(cudaStream_t stream, T* x, const float* table, uint64_t batch, uint64_t sequence_len,
            uint64_t heads, uint64_t head_dim, bool inverse) {
  const int half = static_cast<int>(head_dim / 2);
  const dim3 grid = blocks_x(batch * sequence_len);
  const float sign = inverse ? -1.0f : 1.0f;
  if (half % kPack == 0 && aligned(x, table)) {
    OVERSPILL_LAUNCH((rotate_tokens<kPack, T>), grid, kRotateThreads, 0, stream, x, table,
                     sequence_len, static_cast<int>(heads), half, sign);
  } else {
    OVERSPILL_LAUNCH((rotate_tokens<1, T>), grid, kRotateThreads, 0, stream, x, table, sequence_len,
                     static_cast<int>(heads), half, sign);
  }
}

void document_ends(cudaStream_t stream, const int32_t* document_begins, int32_t* ends,
                   uint64_t batch, uint64_t sequence_len) {
  const uint64_t tokens = batch * sequence_len;
  OVERSPILL_LAUNCH(find_document_ends, blocks_x(ceil_div(tokens, kDocumentThreads)),
                   kDocumentThreads, 0, stream, document_begins, ends, tokens, sequence_len);
}

#define INSTANTIATE(T)                                                                         \
  template void swiglu(cudaStream_t, const T*, const T*, T*, uint64_t);                        \
  template void swiglu_gradient(cudaStream_t, T*, T*, const T*, uint64_t);                     \
  template void add(cudaStream_t, const T*, T*, uint64_t);                                     \
  template void scale(cudaStream_t, T*, float, uint64_t);                                      \
  template void fill_zero(cudaStream_t, T*, uint64_t);                                         \
  template void rotate(cudaStream_t, T*, const float*, uint64_t, uint64_t, uint64_t, uint64_t, \
                       bool);
INSTANTIATE(float)
INSTANTIATE(bf16)
template void add(cudaStream_t, const bf16*, float*, uint64_t);
template void accumulate(cudaStream_t, const float*, float*, uint64_t, bool);
template void accumulate(cudaStream_t, const bf16*, float*, uint64_t, bool);
template void accumulate(cudaStream_t, const __half*, float*, uint64_t, bool);

}  // namespace overspill::cuda
