// The float64 reference.
#include "tests/unit/engine/model/reference_llama.h"

#include <algorithm>
#include <cmath>

namespace overspill::test {
namespace {

constexpr double kTwoPi = 6.283185307179586476925286766559;

/// x [rows, in] times w [out, in] transposed.
Doubles product(const Doubles& x, const Doubles& w, size_t in) {
  const size_t rows = x.size() / in, out = w.size() / in;
  Doubles y(rows * out);
  for (size_t r = 0; r < rows; ++r) {
    for (size_t o = 0; o < out; ++o) {
      double sum = 0;
      for (size_t i = 0; i < in; ++i) sum += x[r * in + i] * w[o * in + i];
      y[r * out + o] = sum;
    }
  }
  return y;
}

Doubles normalized(const Doubles& x, const Doubles& weight, double eps) {
  const size_t d = weight.size();
  Doubles y(x.size());
  for (size_t r = 0; r < x.size() / d; ++r) {
    double squares = 0;
    for (size_t i = 0; i < d; ++i) squares += x[r * d + i] * x[r * d + i];
    const double root = std::sqrt(squares / static_cast<double>(d) + eps);
    for (size_t i = 0; i < d; ++i) y[r * d + i] = x[r * d + i] / root * weight[i];
  }
  return y;
}

/// Multiplies the complex number (x[j], x[j + half]) by e^(i t f_j), for each head of each token.
void rotate_pairs(Doubles& x, const Doubles& frequencies, size_t heads, size_t length) {
  const size_t half = frequencies.size(), dim = 2 * half;
  for (size_t row = 0; row < x.size() / (heads * dim); ++row) {
    const auto position = static_cast<double>(row % length);
    for (size_t h = 0; h < heads; ++h) {
      double* head = &x[(row * heads + h) * dim];
      for (size_t j = 0; j < half; ++j) {
        const double c = std::cos(position * frequencies[j]);
        const double s = std::sin(position * frequencies[j]);
        const double real = head[j], imaginary = head[j + half];
        head[j] = real * c - imaginary * s;
        head[j + half] = real * s + imaginary * c;
      }
    }
  }
}

/// One query of one head over its sequence's keys up to itself.
void attend(const ReferenceSizes& n, const Doubles& q, const Doubles& k, const Doubles& v,
            size_t first_row, size_t t, size_t head, Doubles& out) {
  const size_t dim = n.head_dim, kv_head = head * n.kv_heads / n.heads;
  const double* query = &q[((first_row + t) * n.heads + head) * dim];
  Doubles weight(t + 1);
  double largest = -INFINITY, total = 0;
  for (size_t s = 0; s <= t; ++s) {
    const double* key = &k[((first_row + s) * n.kv_heads + kv_head) * dim];
    for (size_t i = 0; i < dim; ++i) weight[s] += query[i] * key[i];
    weight[s] /= std::sqrt(static_cast<double>(dim));
    largest = std::max(largest, weight[s]);
  }
  for (double& w : weight) total += w = std::exp(w - largest);
  for (size_t s = 0; s <= t; ++s) {
    const double* value = &v[((first_row + s) * n.kv_heads + kv_head) * dim];
    for (size_t i = 0; i < dim; ++i) {
      out[((first_row + t) * n.heads + head) * dim + i] += weight[s] / total * value[i];
    }
  }
}

}  // namespace

Doubles reference_frequencies(const ReferenceSizes& n) {
  Doubles frequencies;
  for (size_t j = 0; j < n.head_dim / 2; ++j) {
    const double exponent = 2.0 * static_cast<double>(j) / static_cast<double>(n.head_dim);
    double f = std::pow(n.rope_theta, -exponent);
    if (n.llama3_scaling) {
      // Waves longer than the original context / low_freq_factor are slowed down by `factor`, those
      // shorter than context / high_freq_factor are kept, and between them it is interpolated.
      const double turns = n.original_context * f / kTwoPi;
      const double kept = (turns - n.low_freq_factor) / (n.high_freq_factor - n.low_freq_factor);
      const double share = std::clamp(kept, 0.0, 1.0);
      f = share * f + (1 - share) * f / n.factor;
    }
    frequencies.push_back(f);
  }
  return frequencies;
}

Doubles reference_embed(const ReferenceSizes& n, const Doubles& table,
                        const std::vector<int32_t>& tokens) {
  Doubles y;
  for (const int32_t token : tokens) {
    const auto row =
        table.begin() + static_cast<ptrdiff_t>(token) * static_cast<ptrdiff_t>(n.hidden);
    y.insert(y.end(), row, row + static_cast<ptrdiff_t>(n.hidden));
  }
  return y;
}

Doubles reference_block(const ReferenceSizes& n, const ReferenceBlock& w, const Doubles& x,
                        size_t length) {
  const size_t rows = x.size() / n.hidden;
  const Doubles frequencies = reference_frequencies(n);
  const Doubles in = normalized(x, w.input_norm, n.eps);
  Doubles q = product(in, w.query, n.hidden), k = product(in, w.key, n.hidden);
  const Doubles v = product(in, w.value, n.hidden);
  rotate_pairs(q, frequencies, n.heads, length);
  rotate_pairs(k, frequencies, n.kv_heads, length);
  Doubles mixed(rows * n.heads * n.head_dim);
  for (size_t row = 0; row < rows; ++row) {
    const size_t t = row % length;
    for (size_t h = 0; h < n.heads; ++h) attend(n, q, k, v, row - t, t, h, mixed);
  }
  Doubles y = product(mixed, w.attention_out, n.heads * n.head_dim);
  for (size_t i = 0; i < y.size(); ++i) y[i] += x[i];
  const Doubles middle = normalized(y, w.post_norm, n.eps);
  Doubles act = product(middle, w.gate, n.hidden);
  const Doubles up = product(middle, w.up, n.hidden);
  for (size_t i = 0; i < act.size(); ++i) act[i] *= up[i] / (1 + std::exp(-act[i]));
  const Doubles down = product(act, w.down, n.ffn);
  for (size_t i = 0; i < y.size(); ++i) y[i] += down[i];
  return y;
}

Doubles reference_logits(const ReferenceSizes& n, const Doubles& norm, const Doubles& projection,
                         const double* row) {
  return product(normalized(Doubles(row, row + n.hidden), norm, n.eps), projection, n.hidden);
}

Doubles reference_losses(const ReferenceSizes& n, const Doubles& norm, const Doubles& projection,
                         const Doubles& x, const std::vector<int32_t>& targets) {
  Doubles losses;
  for (size_t r = 0; r < targets.size(); ++r) {
    const Doubles logits = reference_logits(n, norm, projection, &x[r * n.hidden]);
    const double largest = *std::max_element(logits.begin(), logits.end());
    double total = 0;
    for (const double logit : logits) total += std::exp(logit - largest);
    losses.push_back(largest - logits[static_cast<size_t>(targets[r])] + std::log(total));
  }
  return losses;
}

}  // namespace overspill::test
