// Causal grouped-query attention of the host device, in blocks of queries and keys: no T x T
// matrix. The backward recomputes the probabilities from lse and walks blocks in a fixed order.
#include <algorithm>
#include <cmath>

#include "engine/base/error.h"
#include "engine/base/parallel.h"
#include "engine/base/simd.h"
#include "engine/base/units.h"
#include "engine/model/blas.h"
#include "engine/model/fast_math.h"
#include "engine/model/host_kernels.h"

namespace overspill::host {
namespace {

constexpr uint64_t kQueryBlock = 64, kKeyBlock = 256;

/// Strided views of one head: row t of q starts at q + t * q_stride.
struct Head {
  const AttentionShape& s;
  const int32_t* document_begins;  ///< may be null
  uint64_t batch, head;
  uint64_t q_stride() const { return uint64_t{s.heads} * s.head_dim; }
  uint64_t kv_stride() const { return uint64_t{s.kv_heads} * s.head_dim; }
  uint64_t kv_head() const { return head / (s.heads / s.kv_heads); }
  uint64_t q_offset(uint64_t t) const {
    return (batch * s.sequence_len + t) * q_stride() + head * s.head_dim;
  }
  uint64_t kv_offset(uint64_t t) const {
    return (batch * s.sequence_len + t) * kv_stride() + kv_head() * s.head_dim;
  }
  uint64_t lse_offset(uint64_t t) const { return (batch * s.sequence_len + t) * s.heads + head; }
  uint64_t document_begin(uint64_t t) const {
    if (document_begins == nullptr) return 0;
    return static_cast<uint64_t>(document_begins[batch * s.sequence_len + t]);
  }
  /// Of the first block of keys that some query from `query0` on sees: documents follow each other.
  uint64_t first_key_block(uint64_t query0) const {
    return document_begin(query0) / kKeyBlock * kKeyBlock;
  }
};

OVERSPILL_SIMD float row_max(const float* x, uint64_t size, float least) {
  float lanes[kSumLanes];
  for (uint64_t j = 0; j < kSumLanes; ++j) lanes[j] = least;
  uint64_t i = 0;
  for (; i + kSumLanes <= size; i += kSumLanes) {
    for (uint64_t j = 0; j < kSumLanes; ++j) lanes[j] = lanes[j] < x[i + j] ? x[i + j] : lanes[j];
  }
  for (; i < size; ++i) lanes[0] = lanes[0] < x[i] ? x[i] : lanes[0];
  float best = lanes[0];
  for (uint64_t j = 1; j < kSumLanes; ++j) best = best < lanes[j] ? lanes[j] : best;
  return best;
}

/// x <- exp(x - shift); returns the sum.
OVERSPILL_SIMD float exp_row(float* x, uint64_t size, float shift) {
  float lanes[kSumLanes] = {};
  uint64_t i = 0;
  for (; i + kSumLanes <= size; i += kSumLanes) {
    for (uint64_t j = 0; j < kSumLanes; ++j) {
      const float e = exp_fast(x[i + j] - shift);
      x[i + j] = e;
      lanes[j] += e;
    }
  }
  for (; i < size; ++i) {
    x[i] = exp_fast(x[i] - shift);
    lanes[0] += x[i];
  }
  float sum = 0;
  for (uint64_t j = 0; j < kSumLanes; ++j) sum += lanes[j];
  return sum;
}

OVERSPILL_SIMD void scale_row(float* x, uint64_t size, float factor) {
  for (uint64_t i = 0; i < size; ++i) x[i] *= factor;
}

OVERSPILL_SIMD float dot(const float* a, const float* b, uint64_t size) {
  float lanes[kSumLanes] = {};
  uint64_t i = 0;
  for (; i + kSumLanes <= size; i += kSumLanes) {
    for (uint64_t j = 0; j < kSumLanes; ++j) lanes[j] += a[i + j] * b[i + j];
  }
  for (; i < size; ++i) lanes[0] += a[i] * b[i];
  float sum = 0;
  for (uint64_t j = 0; j < kSumLanes; ++j) sum += lanes[j];
  return sum;
}

/// ds <- p * (dp - delta) * scale, in dp.
OVERSPILL_SIMD void score_gradient_row(const float* p, float* dp, uint64_t size, float delta,
                                       float scale) {
  for (uint64_t i = 0; i < size; ++i) dp[i] = p[i] * (dp[i] - delta) * scale;
}

float* thread_buffer(const KernelScratch& scratch) {
  return reinterpret_cast<float*>(scratch.memory + parallel_slot() * kThreadScratchBytes);
}

/// Keys of [key0, key0 + keys) that query `t` sees, counted from key0: its document's, up to
/// itself.
struct Seen {
  Seen(const Head& h, uint64_t t, uint64_t key0, uint64_t keys) {
    const uint64_t document = h.document_begin(t);
    end = t < key0 ? 0 : std::min(keys, t + 1 - key0);
    begin = document < key0 ? 0 : std::min(end, document - key0);
  }
  uint64_t size() const { return end - begin; }
  /// Zeroes the others' entries.
  void clear_unseen(float* row, uint64_t keys) const {
    std::fill(row, row + begin, 0.0f);
    std::fill(row + end, row + keys, 0.0f);
  }
  uint64_t begin, end;
};

void attention_block(const Head& h, uint64_t query0, const float* q, const float* k, const float* v,
                     float* o, float* lse, float* scores) {
  const AttentionShape& s = h.s;
  const uint64_t queries = std::min(kQueryBlock, s.sequence_len - query0), dim = s.head_dim;
  const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
  float maximum[kQueryBlock], sum[kQueryBlock];
  std::fill_n(maximum, queries, -INFINITY);
  std::fill_n(sum, queries, 0.0f);
  const uint64_t first = h.first_key_block(query0);
  for (uint64_t key0 = first; key0 < query0 + queries; key0 += kKeyBlock) {
    const uint64_t keys = std::min(kKeyBlock, query0 + queries - key0);
    gemm(CblasNoTrans, CblasTrans, queries, keys, dim, scale, q + h.q_offset(query0), h.q_stride(),
         k + h.kv_offset(key0), h.kv_stride(), 0.0f, scores, kKeyBlock);
    for (uint64_t i = 0; i < queries; ++i) {
      float* row = scores + i * kKeyBlock;
      const Seen seen(h, query0 + i, key0, keys);
      seen.clear_unseen(row, keys);
      if (seen.size() == 0) continue;  // before its document, or after itself
      const float new_maximum = row_max(row + seen.begin, seen.size(), maximum[i]);
      // Nothing is summed yet where there is no maximum.
      const bool some = maximum[i] != -INFINITY;
      const float correction = some ? exp_fast(maximum[i] - new_maximum) : 0.0f;
      sum[i] = sum[i] * correction + exp_row(row + seen.begin, seen.size(), new_maximum);
      if (key0 > first) scale_row(o + h.q_offset(query0 + i), dim, correction);
      maximum[i] = new_maximum;
    }
    gemm(CblasNoTrans, CblasNoTrans, queries, dim, keys, 1.0f, scores, kKeyBlock,
         v + h.kv_offset(key0), h.kv_stride(), key0 == first ? 0.0f : 1.0f, o + h.q_offset(query0),
         h.q_stride());
  }
  for (uint64_t i = 0; i < queries; ++i) {
    scale_row(o + h.q_offset(query0 + i), dim, 1.0f / sum[i]);
    lse[h.lse_offset(query0 + i)] = maximum[i] + std::log(sum[i]);
  }
}

struct Gradients {
  float *dq, *dk, *dv;
};

void gradient_block(const Head& h, uint64_t query0, const float* q, const float* k, const float* v,
                    const float* o, const float* lse, const float* d_o, const Gradients& g,
                    float* scratch) {
  const AttentionShape& s = h.s;
  const uint64_t queries = std::min(kQueryBlock, s.sequence_len - query0), dim = s.head_dim;
  const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
  float* p = scratch;
  float* dp = scratch + kQueryBlock * kKeyBlock;
  float delta[kQueryBlock];
  const uint64_t from = h.q_offset(query0), first = h.first_key_block(query0);
  for (uint64_t i = 0; i < queries; ++i) {
    const uint64_t row = h.q_offset(query0 + i);
    delta[i] = dot(o + row, d_o + row, dim);
  }
  for (uint64_t key0 = first; key0 < query0 + queries; key0 += kKeyBlock) {
    const uint64_t keys = std::min(kKeyBlock, query0 + queries - key0), at = h.kv_offset(key0);
    gemm(CblasNoTrans, CblasTrans, queries, keys, dim, scale, q + from, h.q_stride(), k + at,
         h.kv_stride(), 0.0f, p, kKeyBlock);
    gemm(CblasNoTrans, CblasTrans, queries, keys, dim, 1.0f, d_o + from, h.q_stride(), v + at,
         h.kv_stride(), 0.0f, dp, kKeyBlock);
    for (uint64_t i = 0; i < queries; ++i) {
      float* row = p + i * kKeyBlock;
      float* drow = dp + i * kKeyBlock;
      const Seen seen(h, query0 + i, key0, keys);
      exp_row(row + seen.begin, seen.size(), lse[h.lse_offset(query0 + i)]);
      score_gradient_row(row + seen.begin, drow + seen.begin, seen.size(), delta[i], scale);
      seen.clear_unseen(row, keys);
      seen.clear_unseen(drow, keys);
    }
    gemm(CblasTrans, CblasNoTrans, keys, dim, queries, 1.0f, p, kKeyBlock, d_o + from, h.q_stride(),
         1.0f, g.dv + at, h.kv_stride());
    gemm(CblasTrans, CblasNoTrans, keys, dim, queries, 1.0f, dp, kKeyBlock, q + from, h.q_stride(),
         1.0f, g.dk + at, h.kv_stride());
    gemm(CblasNoTrans, CblasNoTrans, queries, dim, keys, 1.0f, dp, kKeyBlock, k + at, h.kv_stride(),
         key0 == first ? 0.0f : 1.0f, g.dq + from, h.q_stride());
  }
}

}  // namespace

void attention(const KernelScratch& scratch, const AttentionShape& s,
               const int32_t* document_begins, const float* q, const float* k, const float* v,
               float* o, float* lse) {
  static_assert(2 * kQueryBlock * kKeyBlock * sizeof(float) <= kThreadScratchBytes);
  const uint64_t blocks = ceil_div(s.sequence_len, kQueryBlock);
  parallel_for(s.batch * s.heads * blocks, [&](uint64_t task) {
    const Head head{s, document_begins, task / blocks / s.heads, task / blocks % s.heads};
    attention_block(head, task % blocks * kQueryBlock, q, k, v, o, lse, thread_buffer(scratch));
  });
}

void attention_gradient(const KernelScratch& scratch, const AttentionShape& s,
                        const int32_t* document_begins, const float* q, const float* k,
                        const float* v, const float* o, const float* lse, const float* d_o,
                        float* dq, float* dk, float* dv) {
  const uint64_t group = s.heads / s.kv_heads;
  // One task owns one key/value head of one sequence: its dk and dv have a single writer.
  parallel_for(s.batch * s.kv_heads, [&](uint64_t task) {
    const uint64_t batch = task / s.kv_heads, kv = task % s.kv_heads;
    const Head owner{s, document_begins, batch, kv * group};
    for (uint64_t t = 0; t < s.sequence_len; ++t) {
      std::fill_n(dk + owner.kv_offset(t), s.head_dim, 0.0f);
      std::fill_n(dv + owner.kv_offset(t), s.head_dim, 0.0f);
    }
    for (uint64_t i = 0; i < group; ++i) {
      const Head head{s, document_begins, batch, kv * group + i};
      for (uint64_t query0 = 0; query0 < s.sequence_len; query0 += kQueryBlock) {
        gradient_block(head, query0, q, k, v, o, lse, d_o, {dq, dk, dv}, thread_buffer(scratch));
      }
    }
  });
}

}  // namespace overspill::host
