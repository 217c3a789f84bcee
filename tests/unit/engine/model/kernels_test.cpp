// Each host kernel against naive float64 loops at odd sizes, and the same bits on every call.
//
// Tolerances are relative to the largest element of a result: float32's roundoff (6e-8) times the
// square root of the terms in a sum, with room for the blockwise softmax's rescaling.
#include "engine/model/kernels.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>

#include "engine/base/parallel.h"
#include "tests/unit/engine/model/llama_under_test.h"
#include "tests/unit/engine/model/random_documents.h"

namespace overspill {
namespace {

using namespace test;
using Floats = std::vector<float>;

const Kernels& k = host_kernels();

/// Scratch that starts as NaN.
struct Scratch {
  std::vector<double> memory =
      Doubles(parallel_threads() * kThreadScratchBytes / sizeof(double), NAN);
  KernelScratch get() { return {reinterpret_cast<std::byte*>(memory.data())}; }
};

void expect_close(const Floats& got, const Doubles& want, double tolerance,
                  double least_scale = 0) {
  ASSERT_EQ(got.size(), want.size());
  double scale = least_scale;
  for (const double value : want) scale = std::max(scale, std::abs(value));
  for (size_t i = 0; i < want.size(); ++i) {
    ASSERT_NEAR(got[i], want[i], tolerance * scale) << "element " << i;
  }
}

bool same_bits(const Floats& a, const Floats& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

/// A matrix in both formats, with equal values.
struct Matrix {
  Floats wide;
  std::vector<uint16_t> narrow;
  Matrix(uint64_t key, size_t size) : wide(normals(key, size)) {
    for (float& value : wide) {
      narrow.push_back(float_to_bf16(value));
      value = bf16_to_float(narrow.back());
    }
  }
  WeightView view(DType type) const {
    if (type == DType::f32) return {wide.data(), type};
    return {narrow.data(), type};
  }
};

/// c[i, j] = start + sum over l of a(i, l) b(l, j), in float64.
template <class A, class B>
Doubles naive_product(size_t rows, size_t columns, size_t depth, const Floats& start, const A& a,
                      const B& b) {
  Doubles c(rows * columns);
  for (size_t i = 0; i < rows; ++i) {
    for (size_t j = 0; j < columns; ++j) {
      double sum = start[i * columns + j];
      for (size_t l = 0; l < depth; ++l) sum += double{a(i, l)} * b(l, j);
      c[i * columns + j] = sum;
    }
  }
  return c;
}

class Linear : public testing::TestWithParam<LinearShape> {
 protected:
  /// Checks call(destination, accumulate) with and without accumulation, twice each.
  template <class Call>
  void check(size_t size, const Doubles& fresh, const Doubles& accumulated, const Call& call) {
    for (const bool accumulate : {false, true}) {
      Floats first = accumulate ? normals(9, size) : nans(size), second = first;
      call(first.data(), accumulate);
      call(second.data(), accumulate);
      expect_close(first, accumulate ? accumulated : fresh, 2e-6);
      EXPECT_TRUE(same_bits(first, second));
    }
  }

  const LinearShape s = GetParam();
  const Floats x = normals(1, s.rows*s.in), dy = normals(2, s.rows*s.out);
  const Matrix w{3, s.in* s.out};
  Scratch scratch;
};

TEST_P(Linear, Forward) {
  const auto product = [&](const Floats& start) {
    return naive_product(
        s.rows, s.out, s.in, start, [&](size_t i, size_t l) { return x[i * s.in + l]; },
        [&](size_t l, size_t j) { return w.wide[j * s.in + l]; });
  };
  const size_t size = s.rows * s.out;
  const Doubles fresh = product(Floats(size)), accumulated = product(normals(9, size));
  for (const DType type : {DType::f32, DType::bf16}) {
    check(size, fresh, accumulated, [&](float* y, bool accumulate) {
      k.linear(scratch.get(), s, x.data(), w.view(type), y, accumulate);
    });
  }
}

TEST_P(Linear, InputGradient) {
  const auto product = [&](const Floats& start) {
    return naive_product(
        s.rows, s.in, s.out, start, [&](size_t i, size_t l) { return dy[i * s.out + l]; },
        [&](size_t l, size_t j) { return w.wide[l * s.in + j]; });
  };
  const size_t size = s.rows * s.in;
  const Doubles fresh = product(Floats(size)), accumulated = product(normals(9, size));
  for (const DType type : {DType::f32, DType::bf16}) {
    check(size, fresh, accumulated, [&](float* dx, bool accumulate) {
      k.linear_input_gradient(scratch.get(), s, dy.data(), w.view(type), dx, accumulate);
    });
  }
}

TEST_P(Linear, WeightGradient) {
  const auto product = [&](const Floats& start) {
    return naive_product(
        s.out, s.in, s.rows, start, [&](size_t i, size_t l) { return dy[l * s.out + i]; },
        [&](size_t l, size_t j) { return x[l * s.in + j]; });
  };
  const size_t size = s.in * s.out;
  check(size, product(Floats(size)), product(normals(9, size)), [&](float* dw, bool accumulate) {
    k.linear_weight_gradient(s, dy.data(), x.data(), dw, accumulate);
  });
}

// Panels are 256 x 1024 weights, tasks 512 rows, blocks of a weight gradient 2048 inputs.
INSTANTIATE_TEST_SUITE_P(Shapes, Linear,
                         testing::Values(LinearShape{1, 1, 1}, LinearShape{3, 7, 5},
                                         LinearShape{33, 129, 65}, LinearShape{5, 2500, 37},
                                         LinearShape{7, 39, 2311}, LinearShape{1037, 23, 300}));

struct AttentionCase {
  Doubles o, lse, dq, dk, dv;
};

/// Forward and backward of softmax(q k^T / sqrt(dim)) v by the chain rule, head by head, over the
/// tokens from each one's document's begin on.
AttentionCase naive_attention(const AttentionShape& s, const std::vector<int32_t>& begins,
                              const Floats& q, const Floats& key, const Floats& v,
                              const Floats& d_o) {
  AttentionCase r{Doubles(q.size()), Doubles(s.batch * s.sequence_len * s.heads), Doubles(q.size()),
                  Doubles(key.size()), Doubles(v.size())};
  const double scale = 1 / std::sqrt(double(s.head_dim));
  for (size_t row = 0; row < s.batch * s.sequence_len; ++row) {
    const size_t t = row % s.sequence_len, begin = static_cast<size_t>(begins[row]);
    for (size_t h = 0; h < s.heads; ++h) {
      const size_t at = (row * s.heads + h) * s.head_dim, kv = h / (s.heads / s.kv_heads);
      Doubles p(t + 1), dp(t + 1);
      const auto kv_at = [&](size_t j) { return ((row - t + j) * s.kv_heads + kv) * s.head_dim; };
      double total = 0, delta = 0;
      for (size_t j = begin; j <= t; ++j) {
        for (size_t i = 0; i < s.head_dim; ++i) p[j] += double{q[at + i]} * key[kv_at(j) + i];
        total += p[j] = std::exp(p[j] * scale);
      }
      r.lse[row * s.heads + h] = std::log(total);
      for (size_t j = begin; j <= t; ++j) {
        p[j] /= total;
        for (size_t i = 0; i < s.head_dim; ++i) {
          r.o[at + i] += p[j] * v[kv_at(j) + i];
          r.dv[kv_at(j) + i] += p[j] * d_o[at + i];
          dp[j] += double{d_o[at + i]} * v[kv_at(j) + i];
        }
        delta += p[j] * dp[j];
      }
      for (size_t j = begin; j <= t; ++j) {
        for (size_t i = 0; i < s.head_dim; ++i) {
          r.dq[at + i] += p[j] * (dp[j] - delta) * scale * key[kv_at(j) + i];
          r.dk[kv_at(j) + i] += p[j] * (dp[j] - delta) * scale * q[at + i];
        }
      }
    }
  }
  return r;
}

/// Two calls, both against the reference; `null`: without begins, which must be zeros.
void check_attention(const AttentionShape& s, const std::vector<int32_t>& begins, bool null) {
  const size_t rows = s.batch * s.sequence_len, width = s.heads * s.head_dim;
  const size_t kv_width = s.kv_heads * s.head_dim;
  const Floats q = normals(1, rows * width), key = normals(2, rows * kv_width);
  const Floats v = normals(3, rows * kv_width), d_o = normals(4, rows * width);
  const AttentionCase want = naive_attention(s, begins, q, key, v, d_o);
  const int32_t* const documents = null ? nullptr : begins.data();
  Floats first;
  for (int call = 0; call < 2; ++call) {
    Scratch scratch;
    Floats o = nans(q.size()), lse = nans(rows * s.heads), dq = nans(q.size());
    Floats dk = nans(key.size()), dv = nans(v.size());
    k.attention(scratch.get(), s, documents, q.data(), key.data(), v.data(), o.data(), lse.data());
    k.attention_gradient(scratch.get(), s, documents, q.data(), key.data(), v.data(), o.data(),
                         lse.data(), d_o.data(), dq.data(), dk.data(), dv.data());
    expect_close(o, want.o, 2e-6);
    expect_close(lse, want.lse, 1e-6);
    expect_close(dq, want.dq, 2e-6, 2);  // exactly 0 where documents are single tokens
    expect_close(dk, want.dk, 2e-6, 2);
    expect_close(dv, want.dv, 2e-6);
    Floats all = o;
    for (const Floats& more : {lse, dq, dk, dv}) all.insert(all.end(), more.begin(), more.end());
    if (call == 0) first = all;
    EXPECT_TRUE(same_bits(first, all));
  }
}

class Attention : public testing::TestWithParam<AttentionShape> {};

TEST_P(Attention, ForwardAndGradient) {
  const AttentionShape& s = GetParam();
  check_attention(s, random_documents(s, 0, 0), true);
}

TEST_P(Attention, OfDocuments) {
  const AttentionShape& s = GetParam();
  for (const uint64_t longest : {uint64_t{1}, uint64_t{5}, uint64_t{90}, uint64_t{700}}) {
    SCOPED_TRACE(longest);
    check_attention(s, random_documents(s, 7, longest), false);
  }
}

// Blocks are 64 queries and 256 keys.
INSTANTIATE_TEST_SUITE_P(
    Shapes, Attention,
    testing::Values(AttentionShape{1, 1, 1, 1, 8}, AttentionShape{2, 63, 2, 2, 8},
                    AttentionShape{2, 64, 4, 2, 16}, AttentionShape{1, 65, 3, 1, 22},
                    AttentionShape{1, 257, 2, 1, 64}, AttentionShape{1, 519, 1, 1, 128},
                    AttentionShape{1, 130, 2, 2, 256}));

Floats attend(const AttentionShape& s, const int32_t* documents, const Floats& q, const Floats& key,
              const Floats& v) {
  Scratch scratch;
  Floats o = nans(q.size()), lse = nans(s.batch * s.sequence_len * s.heads);
  k.attention(scratch.get(), s, documents, q.data(), key.data(), v.data(), o.data(), lse.data());
  return o;
}

TEST(AttentionKernel, OneDocumentKeepsTheBits) {
  const AttentionShape s{2, 300, 4, 2, 16};
  const Floats q = normals(1, 600 * 64), key = normals(2, 600 * 32), v = normals(3, 600 * 32);
  const std::vector<int32_t> zeros(600);
  EXPECT_TRUE(same_bits(attend(s, nullptr, q, key, v), attend(s, zeros.data(), q, key, v)));
}

/// Keys that queries of other documents cannot see do not matter, whatever they are.
TEST(AttentionKernel, OtherDocumentsCannotBeSeen) {
  const AttentionShape s{1, 600, 1, 1, 8};
  const Floats q = normals(1, 600 * 8), key = normals(2, 600 * 8), v = normals(3, 600 * 8);
  std::vector<int32_t> begins(600);
  std::fill(begins.begin() + 310, begins.end(), 310);
  const Floats packed = attend(s, begins.data(), q, key, v);
  const auto part = [](const Floats& all) { return Floats(all.begin() + 310 * 8, all.end()); };
  const Floats alone = attend({1, 290, 1, 1, 8}, nullptr, part(q), part(key), part(v));
  const Floats second = part(packed);
  for (size_t i = 0; i < alone.size(); ++i) ASSERT_NEAR(second[i], alone[i], 2e-6) << i;
  Floats other_key = key, other_v = v;
  for (size_t i = 0; i < 310 * 8; ++i) other_key[i] = -9 * key[i], other_v[i] = 100 + v[i];
  EXPECT_TRUE(same_bits(second, part(attend(s, begins.data(), q, other_key, other_v))));
}

TEST(AttentionKernel, LargeScoresNeitherOverflowNorLoseTheLargest) {
  const AttentionShape s{1, 300, 1, 1, 8};
  Floats q(300 * 8, 30.0f), key(300 * 8), v = normals(3, 300 * 8);
  for (size_t t = 0; t < 300; ++t) {  // scores of t * 8.5 up to 2500: only the last key counts
    for (size_t i = 0; i < 8; ++i) key[t * 8 + i] = 0.1f * static_cast<float>(t);
  }
  Scratch scratch;
  Floats o = nans(q.size()), lse = nans(300);
  k.attention(scratch.get(), s, nullptr, q.data(), key.data(), v.data(), o.data(), lse.data());
  for (size_t i = 8; i < o.size(); ++i) ASSERT_NEAR(o[i], v[i], 2e-3) << i;
}

}  // namespace
}  // namespace overspill
