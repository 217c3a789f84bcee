// Causal attention with grouped heads and its gradient in float64, straight from the formulas.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "engine/model/kernels.h"
#include "tests/emulation/test_tensor.h"

namespace overspill {

/// All in the tensors' own order; lse [batch, heads, sequence_len].
struct AttentionReference {
  std::vector<double> o, lse, dq, dk, dv;
};

class AttentionRow {
 public:
  AttentionRow(const AttentionShape& shape, uint64_t batch, uint64_t head, uint64_t row)
      : shape_(shape), batch_(batch), head_(head), row_(row) {}
  uint64_t q(uint64_t i) const {
    return ((batch_ * shape_.sequence_len + row_) * shape_.heads + head_) * shape_.head_dim + i;
  }
  uint64_t k(uint64_t column, uint64_t i) const {
    const uint64_t kv_head = head_ / (shape_.heads / shape_.kv_heads);
    return ((batch_ * shape_.sequence_len + column) * shape_.kv_heads + kv_head) * shape_.head_dim +
           i;
  }
  uint64_t lse() const { return (batch_ * shape_.heads + head_) * shape_.sequence_len + row_; }

 private:
  const AttentionShape& shape_;
  uint64_t batch_, head_, row_;
};

/// `window` tokens are seen, 0: all, and none before a token's document, whose begins are given per
/// token or not at all. Without `d_o` no gradients.
inline AttentionReference reference_attention(const AttentionShape& shape, uint64_t window,
                                              const std::vector<int32_t>& begins,
                                              const TestTensor& q, const TestTensor& k,
                                              const TestTensor& v, const TestTensor& d_o) {
  AttentionReference result;
  result.o.resize(q.size());
  result.dq.resize(q.size());
  result.dk.resize(k.size());
  result.dv.resize(k.size());
  result.lse.resize(shape.batch * shape.heads * shape.sequence_len);
  const uint64_t d = shape.head_dim;
  const double scale = 1.0 / std::sqrt(static_cast<double>(d));
  const auto one_row = [&](const AttentionRow& at, uint64_t first, uint64_t last) {
    std::vector<double> p(last + 1), dp(last + 1);
    double maximum = -INFINITY, sum = 0.0, mean = 0.0;
    for (uint64_t j = first; j <= last; ++j) {
      for (uint64_t i = 0; i < d; ++i) p[j] += scale * q[at.q(i)] * k[at.k(j, i)];
      maximum = std::max(maximum, p[j]);
    }
    for (uint64_t j = first; j <= last; ++j) sum += p[j] = std::exp(p[j] - maximum);
    result.lse[at.lse()] = maximum + std::log(sum);
    for (uint64_t j = first; j <= last; ++j) {
      p[j] /= sum;
      for (uint64_t i = 0; i < d; ++i) {
        result.o[at.q(i)] += p[j] * v[at.k(j, i)];
        result.dv[at.k(j, i)] += p[j] * d_o[at.q(i)];
        dp[j] += d_o[at.q(i)] * v[at.k(j, i)];
      }
      mean += p[j] * dp[j];
    }
    for (uint64_t j = first; j <= last; ++j) {
      const double dx = scale * p[j] * (dp[j] - mean);
      for (uint64_t i = 0; i < d; ++i) {
        result.dq[at.q(i)] += dx * k[at.k(j, i)];
        result.dk[at.k(j, i)] += dx * q[at.q(i)];
      }
    }
  };
  for (uint64_t batch = 0; batch < shape.batch; ++batch) {
    for (uint64_t head = 0; head < shape.heads; ++head) {
      for (uint64_t row = 0; row < shape.sequence_len; ++row) {
        uint64_t first = window == 0 || row < window ? 0 : row - window + 1;
        if (!begins.empty()) {
          const int32_t begin = begins[batch * shape.sequence_len + row];
          first = std::max(first, static_cast<uint64_t>(begin));
        }
        one_row(AttentionRow(shape, batch, head, row), first, row);
      }
    }
  }
  return result;
}

}  // namespace overspill
