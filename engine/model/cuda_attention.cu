// Causal grouped-query attention without tensor cores: the fallback where cuDNN has no plan.
// Blockwise with a running softmax (Milakov and Gimelshein 2018; Dao 2022); the backward recomputes
// the probabilities from lse. A warp owns four rows (queries, or keys in the gradient of keys and
// values), its lanes are the 32 rows of a tile of the other side. Every sum has a fixed order.
#include "engine/base/cuda_vector.h"
#include "engine/model/cuda_kernels.h"

namespace overspill::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarpRows = 4;
constexpr int kRows = kThreads / kWarp * kWarpRows;  // of a block
constexpr int kTile = kWarp;

struct Shape {
  uint64_t sequence_len;
  int heads, kv_heads, dim;
  float scale;
  const int32_t* document_begins;  ///< may be null
};

/// Rows of one head: row t starts at values + t * stride.
template <class T>
struct Head {
  T* values;
  uint64_t stride;
};
/// blockIdx.z is the sequence; head < heads.
template <class T>
__device__ Head<T> head_of(T* values, const Shape& s, int heads, int head) {
  const uint64_t stride = static_cast<uint64_t>(heads) * s.dim;
  return {values + blockIdx.z * s.sequence_len * stride + static_cast<uint64_t>(head) * s.dim,
          stride};
}
__device__ inline uint64_t statistic(const Shape& s, uint64_t t, int head) {
  return (blockIdx.z * s.sequence_len + t) * s.heads + head;
}

/// Where the document of a token of the block's sequence begins. They follow each other: the begins
/// only grow.
__device__ inline uint64_t document_begin(const Shape& s, uint64_t t) {
  if (s.document_begins == nullptr || t >= s.sequence_len) return 0;
  return static_cast<uint64_t>(s.document_begins[blockIdx.z * s.sequence_len + t]);
}
/// Of the warp's queries.
__device__ inline void document_begins(const Shape& s, uint64_t first_query,
                                       uint32_t (&begins)[kWarpRows]) {
#pragma unroll
  for (int r = 0; r < kWarpRows; ++r) {
    begins[r] = static_cast<uint32_t>(document_begin(s, first_query + r));
  }
}
/// Of the first tile of keys that the block's queries see.
__device__ inline uint64_t first_tile(const Shape& s, uint64_t query0) {
  return document_begin(s, query0) / kTile * kTile;
}

/// Rows [first, first + kCount) of a head as float32 in shared memory; zero beyond the sequence and
/// the head's dimension, up to kDim.
template <int kCount, int kDim, int kPitch, class T>
__device__ void load_rows(const Head<const T>& head, const Shape& s, uint64_t first,
                          float (&to)[kCount][kPitch]) {
#pragma unroll 4
  for (int i = threadIdx.x; i < kCount * kDim; i += kThreads) {
    const int r = i / kDim, c = i % kDim;
    const bool inside = first + r < s.sequence_len && c < s.dim;
    to[r][c] = inside ? to_float(head.values[(first + r) * head.stride + c]) : 0.0f;
  }
}

/// Products of the warp's rows with the lane's row of the tile. The tile's odd pitch keeps lanes in
/// different banks.
template <int kDim>
__device__ void products(const float (&rows)[kRows][kDim], const float (&tile)[kTile][kDim + 1],
                         float (&out)[kWarpRows]) {
  const int lane = threadIdx.x % kWarp, first = threadIdx.x / kWarp * kWarpRows;
  for (int r = 0; r < kWarpRows; ++r) out[r] = 0;
#pragma unroll 4
  for (int c = 0; c < kDim; c += 4) {
    const float* other = &tile[lane][c];
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) {
      const float4 row = *reinterpret_cast<const float4*>(&rows[first + r][c]);
      out[r] += row.x * other[0] + row.y * other[1] + row.z * other[2] + row.w * other[3];
    }
  }
}

/// sums[r][k] += over the tile's rows j: weights[r][j] * tile[j][k * 32 + lane].
template <int kDim>
__device__ void add_weighted(const float (&weights)[kRows][kTile],
                             const float (&tile)[kTile][kDim + 1],
                             float (&sums)[kWarpRows][kDim / kWarp]) {
  const int lane = threadIdx.x % kWarp, first = threadIdx.x / kWarp * kWarpRows;
#pragma unroll 2
  for (int j = 0; j < kTile; j += 4) {
    float w[kWarpRows][4];
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) {
      const float4 row = *reinterpret_cast<const float4*>(&weights[first + r][j]);
      w[r][0] = row.x, w[r][1] = row.y, w[r][2] = row.z, w[r][3] = row.w;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int k = 0; k < kDim / kWarp; ++k) {
        const float value = tile[j + i][k * kWarp + lane];
#pragma unroll
        for (int r = 0; r < kWarpRows; ++r) sums[r][k] += w[r][i] * value;
      }
    }
  }
}

/// Gives the lanes' weights of the warp's rows to the whole warp.
__device__ inline void share(const float (&mine)[kWarpRows], float (&weights)[kRows][kTile]) {
  const int lane = threadIdx.x % kWarp, first = threadIdx.x / kWarp * kWarpRows;
  warp_barrier();  // the last weights are read
#pragma unroll
  for (int r = 0; r < kWarpRows; ++r) weights[first + r][lane] = mine[r];
  warp_barrier();
}

template <int kDim, class T>
__device__ void store_row(const float (&row)[kDim / kWarp], float factor, const Shape& s, T* to) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int k = 0; k < kDim / kWarp; ++k) {
    const int c = k * kWarp + lane;
    if (c < s.dim) to[c] = from_float<T>(row[k] * factor);
  }
}

template <class T>
struct Forward {
  Shape s;
  const T *q, *k, *v;
  T* o;
  float* lse;
};

/// A block is 16 queries of a head: blockIdx is (queries, head, sequence). The last queries, which
/// see the most keys, start first.
template <int kDim, class T>
__global__ void __launch_bounds__(kThreads, 3) attend(Forward<T> a) {
  OVERSPILL_SHARED(float, queries, [kRows][kDim]);
  OVERSPILL_SHARED(float, tile, [kTile][kDim + 1]);  // of keys, then of values
  OVERSPILL_SHARED(float, weights, [kRows][kTile]);
  const Shape& s = a.s;
  const int head = blockIdx.y, kv_head = head / (s.heads / s.kv_heads);
  const int lane = threadIdx.x % kWarp, warp_row = threadIdx.x / kWarp * kWarpRows;
  const uint64_t query0 = uint64_t{gridDim.x - 1 - blockIdx.x} * kRows;
  const uint64_t end = query0 + kRows < s.sequence_len ? query0 + kRows : s.sequence_len;
  load_rows<kRows, kDim>(head_of(a.q, s, s.heads, head), s, query0, queries);
  float sums[kWarpRows][kDim / kWarp] = {}, maximum[kWarpRows], total[kWarpRows] = {};
  for (int r = 0; r < kWarpRows; ++r) maximum[r] = -INFINITY;
  uint32_t begins[kWarpRows];
  document_begins(s, query0 + warp_row, begins);
  for (uint64_t key0 = first_tile(s, query0); key0 < end; key0 += kTile) {
    load_rows<kTile, kDim>(head_of(a.k, s, s.kv_heads, kv_head), s, key0, tile);
    block_barrier();
    float p[kWarpRows];
    products<kDim>(queries, tile, p);
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) {
      const uint64_t key = key0 + lane;
      const bool seen = key >= begins[r] && key <= query0 + warp_row + r;
      const float score = seen ? p[r] * s.scale : -INFINITY;
      const float next = fmaxf(maximum[r], warp_max(score));
      // A tile before the query's document has no key for it, and inf - inf would be NaN.
      const float shift = next == -INFINITY ? 0.0f : next;
      const float correction = expf(maximum[r] - shift);
      p[r] = expf(score - shift);
      total[r] = total[r] * correction + warp_sum(p[r]);
      maximum[r] = next;
#pragma unroll
      for (int k = 0; k < kDim / kWarp; ++k) sums[r][k] *= correction;
    }
    share(p, weights);
    block_barrier();
    load_rows<kTile, kDim>(head_of(a.v, s, s.kv_heads, kv_head), s, key0, tile);
    block_barrier();
    add_weighted<kDim>(weights, tile, sums);
    block_barrier();
  }
  const Head<T> out = head_of(a.o, s, s.heads, head);
#pragma unroll
  for (int r = 0; r < kWarpRows; ++r) {
    const uint64_t t = query0 + warp_row + r;
    if (t >= s.sequence_len) continue;
    store_row<kDim>(sums[r], 1.0f / total[r], s, out.values + t * out.stride);
    if (lane == 0) a.lse[statistic(s, t, head)] = maximum[r] + logf(total[r]);
  }
}

template <class T>
struct Backward {
  Shape s;
  const T *q, *k, *v, *o;
  const float* lse;
  const T* d_o;
  float* delta;  ///< as lse: sum over the head's dimension of o * d_o
  T *dq, *dk, *dv;
};

/// A warp is one head of one token; `rows` of them.
template <class T>
__global__ void __launch_bounds__(kThreads) row_deltas(Backward<T> a, uint64_t rows) {
  const uint64_t row = uint64_t{blockIdx.x} * (kThreads / kWarp) + threadIdx.x / kWarp;
  if (row >= rows) return;
  float sum = 0;
  for (int c = threadIdx.x % kWarp; c < a.s.dim; c += kWarp) {
    sum += to_float(a.o[row * a.s.dim + c]) * to_float(a.d_o[row * a.s.dim + c]);
  }
  sum = warp_sum(sum);
  if (threadIdx.x % kWarp == 0) a.delta[row] = sum;
}

/// dq of 16 queries of a head, as attend.
template <int kDim, class T>
__global__ void __launch_bounds__(kThreads, 3) query_gradient(Backward<T> a) {
  OVERSPILL_SHARED(float, queries, [kRows][kDim]);
  OVERSPILL_SHARED(float, d_out, [kRows][kDim]);
  OVERSPILL_SHARED(float, tile, [kTile][kDim + 1]);  // of values, then of keys
  OVERSPILL_SHARED(float, weights, [kRows][kTile]);
  const Shape& s = a.s;
  const int head = blockIdx.y, kv_head = head / (s.heads / s.kv_heads);
  const int lane = threadIdx.x % kWarp, warp_row = threadIdx.x / kWarp * kWarpRows;
  const uint64_t query0 = uint64_t{gridDim.x - 1 - blockIdx.x} * kRows;
  const uint64_t end = query0 + kRows < s.sequence_len ? query0 + kRows : s.sequence_len;
  load_rows<kRows, kDim>(head_of(a.q, s, s.heads, head), s, query0, queries);
  load_rows<kRows, kDim>(head_of(a.d_o, s, s.heads, head), s, query0, d_out);
  float sums[kWarpRows][kDim / kWarp] = {}, lse[kWarpRows] = {}, delta[kWarpRows] = {};
#pragma unroll
  for (int r = 0; r < kWarpRows; ++r) {
    const uint64_t t = query0 + warp_row + r;
    if (t >= s.sequence_len) continue;
    lse[r] = a.lse[statistic(s, t, head)];
    delta[r] = a.delta[statistic(s, t, head)];
  }
  uint32_t begins[kWarpRows];
  document_begins(s, query0 + warp_row, begins);
  for (uint64_t key0 = first_tile(s, query0); key0 < end; key0 += kTile) {
    float dp[kWarpRows], p[kWarpRows];
    load_rows<kTile, kDim>(head_of(a.v, s, s.kv_heads, kv_head), s, key0, tile);
    block_barrier();
    products<kDim>(d_out, tile, dp);
    block_barrier();
    load_rows<kTile, kDim>(head_of(a.k, s, s.kv_heads, kv_head), s, key0, tile);
    block_barrier();
    products<kDim>(queries, tile, p);
#pragma unroll
    for (int r = 0; r < kWarpRows; ++r) {
      const uint64_t key = key0 + lane;
      const bool seen = key >= begins[r] && key <= query0 + warp_row + r;
      p[r] = seen ? expf(p[r] * s.scale - lse[r]) * (dp[r] - delta[r]) * s.scale : 0.0f;
    }
    share(p, weights);
    add_weighted<kDim>(weights, tile, sums);
    block_barrier();
  }
  const Head<T> out = head_of(a.dq, s, s.heads, head);
#pragma unroll
  for (int r = 0; r < kWarpRows; ++r) {
    const uint64_t t = query0 + warp_row + r;
    if (t < s.sequence_len) store_row<kDim>(sums[r], 1.0f, s, out.values + t * out.stride);
  }
}

/// dk and dv of 16 keys of a key-value head: blockIdx is (keys, kv_head, sequence). Sums over the
/// heads that share it, in order.
template <int kDim, class T>
__global__ void __launch_bounds__(kThreads, 3) key_value_gradient(Backward<T> a) {
  OVERSPILL_SHARED(float, keys, [kRows][kDim]);
  OVERSPILL_SHARED(float, values, [kRows][kDim]);
  OVERSPILL_SHARED(float, tile, [kTile][kDim + 1]);  // of queries, of d_o, of queries again
  OVERSPILL_SHARED(float, weights, [kRows][kTile]);
  const Shape& s = a.s;
  const int kv_head = blockIdx.y, group = s.heads / s.kv_heads;
  const int lane = threadIdx.x % kWarp, warp_row = threadIdx.x / kWarp * kWarpRows;
  const uint64_t key0 = uint64_t{blockIdx.x} * kRows;
  load_rows<kRows, kDim>(head_of(a.k, s, s.kv_heads, kv_head), s, key0, keys);
  load_rows<kRows, kDim>(head_of(a.v, s, s.kv_heads, kv_head), s, key0, values);
  float dk[kWarpRows][kDim / kWarp] = {}, dv[kWarpRows][kDim / kWarp] = {};
  for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
    const Head<const T> q = head_of(a.q, s, s.heads, head);
    const Head<const T> d_o = head_of(a.d_o, s, s.heads, head);
    for (uint64_t query0 = key0 / kTile * kTile; query0 < s.sequence_len; query0 += kTile) {
      // Later documents see none of these keys.
      if (document_begin(s, query0) >= key0 + kRows) break;
      const uint64_t t = query0 + lane, document = document_begin(s, t);
      const bool inside = t < s.sequence_len;
      const float lse = inside ? a.lse[statistic(s, t, head)] : 0.0f;
      const float delta = inside ? a.delta[statistic(s, t, head)] : 0.0f;
      float p[kWarpRows], dp[kWarpRows];
      load_rows<kTile, kDim>(q, s, query0, tile);
      block_barrier();
      products<kDim>(keys, tile, p);
#pragma unroll
      for (int r = 0; r < kWarpRows; ++r) {
        const uint64_t key = key0 + warp_row + r;
        const bool seen = inside && key >= document && key <= t;
        p[r] = seen ? expf(p[r] * s.scale - lse) : 0.0f;
      }
      share(p, weights);
      block_barrier();
      load_rows<kTile, kDim>(d_o, s, query0, tile);
      block_barrier();
      products<kDim>(values, tile, dp);
      add_weighted<kDim>(weights, tile, dv);
#pragma unroll
      for (int r = 0; r < kWarpRows; ++r) p[r] *= (dp[r] - delta) * s.scale;
      share(p, weights);
      block_barrier();
      load_rows<kTile, kDim>(q, s, query0, tile);
      block_barrier();
      add_weighted<kDim>(weights, tile, dk);
      block_barrier();
    }
  }
  const Head<T> out_k = head_of(a.dk, s, s.kv_heads, kv_head);
  const Head<T> out_v = head_of(a.dv, s, s.kv_heads, kv_head);
#pragma unroll
  for (int r = 0; r < kWarpRows; ++r) {
    const uint64_t t = key0 + warp_row + r;
    if (t >= s.sequence_len) continue;
    store_row<kDim>(dk[r], 1.0f, s, out_k.values + t * out_k.stride);
    store_row<kDim>(dv[r], 1.0f, s, out_v.values + t * out_v.stride);
  }
}

Shape shape_of(const AttentionShape& s, const int32_t* document_begins) {
  const int heads = static_cast<int>(s.heads), kv_heads = static_cast<int>(s.kv_heads);
  const int dim = static_cast<int>(s.head_dim);
  const float scale = 1.0f / sqrtf(static_cast<float>(dim));
  return {s.sequence_len, heads, kv_heads, dim, scale, document_begins};
}

dim3 grid_of(const AttentionShape& s, uint32_t heads) {
  return blocks_x(ceil_div(s.sequence_len, kRows), heads, static_cast<unsigned>(s.batch));
}

template <int kDim, class T>
void launch_gradients(cudaStream_t stream, const AttentionShape& s, const Backward<T>& a) {
  OVERSPILL_LAUNCH((query_gradient<kDim, T>), grid_of(s, s.heads), kThreads, 0, stream, a);
  OVERSPILL_LAUNCH((key_value_gradient<kDim, T>), grid_of(s, s.kv_heads), kThreads, 0, stream, a);
}

}  // namespace

template <class T>
void attention(cudaStream_t stream, const AttentionShape& s, const int32_t* document_begins,
               const T* q, const T* k, const T* v, T* o, float* lse) {
  const Forward<T> a{shape_of(s, document_begins), q, k, v, o, lse};
  const dim3 grid = grid_of(s, s.heads);
  if (s.head_dim <= 32) {
    OVERSPILL_LAUNCH((attend<32, T>), grid, kThreads, 0, stream, a);
  } else if (s.head_dim <= 64) {
    OVERSPILL_LAUNCH((attend<64, T>), grid, kThreads, 0, stream, a);
  } else if (s.head_dim <= 96) {
    OVERSPILL_LAUNCH((attend<96, T>), grid, kThreads, 0, stream, a);
  } else if (s.head_dim <= kMaxHeadDim) {
    OVERSPILL_LAUNCH((attend<128, T>), grid, kThreads, 0, stream, a);
  } else {
    launch_failed("attention", "head_dim is larger than 128");
  }
}

uint64_t attention_gradient_workspace_bytes(const AttentionShape& s) {
  return s.batch * s.sequence_len * s.heads * sizeof(float);
}

template <class T>
void attention_gradient(cudaStream_t stream, const AttentionShape& s,
                        const int32_t* document_begins, const T* q, const T* k, const T* v,
                        const T* o, const float* lse, const T* d_o, T* dq, T* dk, T* dv,
                        void* workspace) {
  const Backward<T> a{shape_of(s, document_begins),   q,  k,  v, o, lse, d_o,
                      static_cast<float*>(workspace), dq, dk, dv};
  const uint64_t rows = s.batch * s.sequence_len * s.heads;
  OVERSPILL_LAUNCH(row_deltas<T>, blocks_x(ceil_div(rows, kThreads / kWarp)), kThreads, 0, stream,
                   a, rows);
  if (s.head_dim <= 32) return launch_gradients<32>(stream, s, a);
  if (s.head_dim <= 64) return launch_gradients<64>(stream, s, a);
  if (s.head_dim <= 96) return launch_gradients<96>(stream, s, a);
  if (s.head_dim <= kMaxHeadDim) return launch_gradients<128>(stream, s, a);
  launch_failed("attention_gradient", "head_dim is larger than 128");
}

#define INSTANTIATE(T)                                                                             \
  template void attention(cudaStream_t, const AttentionShape&, const int32_t*, const T*, const T*, \
                          const T*, T*, float*);                                                   \
  template void attention_gradient(cudaStream_t, const AttentionShape&, const int32_t*, const T*,  \
                                   const T*, const T*, const T*, const float*, const T*, T*, T*,   \
                                   T*, void*);
INSTANTIATE(float)
INSTANTIATE(bf16)

}  // namespace overspill::cuda
