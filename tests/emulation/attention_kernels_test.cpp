// The portable attention and its gradient against float64, the gradient from the stored o. Bounds:
// 2^-18 of the largest, and half a unit of bf16's last place where that is stored.
#include "engine/model/cuda_kernels.h"
#include "tests/emulation/kernel_fixture.h"
#include "tests/unit/engine/model/random_documents.h"

namespace overspill {
namespace {

using namespace test;

class AttentionKernels : public KernelTest {};
INSTANTIATE_SEEDS(AttentionKernels);

struct Reference {
  Doubles o, lse, dq, dk, dv;
};

/// All values as stored. Without `o` its gradients are those of its exact values.
Reference reference(const AttentionShape& s, const std::vector<int32_t>& begins, const Doubles& q,
                    const Doubles& k, const Doubles& v, const Doubles& d_o, const Doubles& o = {}) {
  Reference ref{Doubles(q.size()), Doubles(s.batch * s.sequence_len * s.heads), Doubles(q.size()),
                Doubles(k.size()), Doubles(k.size())};
  const size_t dim = s.head_dim;
  const double scale = 1 / std::sqrt(double(dim));
  const auto row = [&](size_t b, size_t t, size_t heads, size_t head) {
    return ((b * s.sequence_len + t) * heads + head) * dim;
  };
  const auto dot = [dim](const double* a, const double* b) {
    double sum = 0;
    for (size_t c = 0; c < dim; ++c) sum += a[c] * b[c];
    return sum;
  };
  for (size_t b = 0; b < s.batch; ++b) {
    for (size_t h = 0; h < s.heads; ++h) {
      const size_t kv_head = h / (s.heads / s.kv_heads);
      for (size_t t = 0; t < s.sequence_len; ++t) {
        const size_t at = row(b, t, s.heads, h);
        const auto begin = static_cast<size_t>(begins[b * s.sequence_len + t]);
        Doubles p(t + 1), dp(t + 1);
        double sum = 0;
        for (size_t j = begin; j <= t; ++j) {
          p[j] = std::exp(scale * dot(&q[at], &k[row(b, j, s.kv_heads, kv_head)]));
          sum += p[j];
        }
        ref.lse[at / dim] = std::log(sum);
        for (size_t j = begin; j <= t; ++j) {
          const size_t kv = row(b, j, s.kv_heads, kv_head);
          p[j] /= sum;
          dp[j] = dot(&d_o[at], &v[kv]);
          for (size_t c = 0; c < dim; ++c) ref.o[at + c] += p[j] * v[kv + c];
        }
        const double delta = dot(o.empty() ? &ref.o[at] : &o[at], &d_o[at]);
        for (size_t j = begin; j <= t; ++j) {
          const size_t kv = row(b, j, s.kv_heads, kv_head);
          const double ds = p[j] * (dp[j] - delta) * scale;
          for (size_t c = 0; c < dim; ++c) {
            ref.dv[kv + c] += p[j] * d_o[at + c];
            ref.dq[at + c] += ds * k[kv + c];
            ref.dk[kv + c] += ds * q[at + c];
          }
        }
      }
    }
  }
  return ref;
}

/// With documents of random lengths up to `longest`; 0: with none.
template <class T>
void check(const AttentionShape& s, uint64_t longest = 0) {
  SCOPED_TRACE(testing::Message() << s.sequence_len << " tokens, head size " << s.head_dim);
  const size_t tokens = s.batch * s.sequence_len;
  const size_t q_size = tokens * s.heads * s.head_dim, kv_size = tokens * s.kv_heads * s.head_dim;
  const Array<T> q = normals<T>(1, q_size, 1.5f), k = normals<T>(2, kv_size, 1.5f);
  const Array<T> v = normals<T>(3, kv_size), d_o = normals<T>(4, q_size);
  const Array<T> o(q_size), dq(q_size), dk(kv_size), dv(kv_size);
  const Array<float> lse(tokens * s.heads);
  const Array<std::byte> workspace(cuda::attention_gradient_workspace_bytes(s));
  const std::vector<int32_t> begins = random_documents(s, 5, longest);
  const Array<int32_t> documents(begins, 0);
  const int32_t* const given = longest == 0 ? nullptr : documents.data();
  Reference want = reference(s, begins, q.values(), k.values(), v.values(), d_o.values());
  cuda::attention(nullptr, s, given, q.data(), k.data(), v.data(), o.data(), lse.data());
  expect_close(o, want.o, {0, 0x1p-18});
  expect_close(lse, want.lse, {0, 0x1p-20, 0x1p-21});
  want = reference(s, begins, q.values(), k.values(), v.values(), d_o.values(), o.values());
  cuda::attention_gradient(nullptr, s, given, q.data(), k.data(), v.data(), o.data(), lse.data(),
                           d_o.data(), dq.data(), dk.data(), dv.data(), workspace.data());
  const Bound bound{0, 0x1p-18, 0x1p-18};  // absolute for one token, whose dq and dk are 0
  expect_close(dq, want.dq, bound);
  expect_close(dk, want.dk, bound);
  expect_close(dv, want.dv, bound);
}

TEST_P(AttentionKernels, OneToken) {
  check<float>({1, 1, 1, 1, 64});
  check<bf16>({2, 1, 2, 1, 8});
}

TEST_P(AttentionKernels, HeadSizes) {
  for (const uint32_t dim : {8, 10, 32, 48, 64, 80, 96, 128}) {
    check<float>({1, 37, 1, 1, dim});
    check<bf16>({1, 37, 1, 1, dim});
  }
}

TEST_P(AttentionKernels, GroupedQueries) {
  check<float>({2, 21, 4, 2, 16});
  check<bf16>({1, 33, 6, 1, 64});
  check<float>({2, 16, 3, 3, 32});
}

TEST_P(AttentionKernels, SequencesAroundTiles) {
  for (const uint64_t length : {15, 16, 17, 31, 32, 33, 64, 65, 97}) {
    check<bf16>({1, length, 2, 1, 32});
  }
}

TEST_P(AttentionKernels, Documents) {
  for (const uint64_t longest : {1, 3, 20, 60}) {
    check<float>({2, 97, 2, 1, 32}, longest);
    check<bf16>({1, 65, 2, 2, 64}, longest);
  }
  check<float>({3, 40, 4, 2, 16}, 25);
  check<bf16>({1, 130, 1, 1, 128}, 100);
}

TEST_P(AttentionKernels, LargeScores) {
  constexpr AttentionShape kShape{1, 40, 1, 1, 32};
  const Array<float> q = normals<float>(1, 40 * 32, 100), k = normals<float>(2, 40 * 32, 100);
  const Array<float> v = normals<float>(3, 40 * 32), o(40 * 32), lse(40);
  cuda::attention(nullptr, kShape, nullptr, q.data(), k.data(), v.data(), o.data(), lse.data());
  for (const double value : o.values()) ASSERT_TRUE(std::isfinite(value));
}

TEST(AttentionKernels, RefusesHeadsThatAreTooLarge) {
  EXPECT_ANY_THROW(cuda::attention<float>(nullptr, {1, 1, 1, 1, 256}, nullptr, nullptr, nullptr,
                                          nullptr, nullptr, nullptr));
}

}  // namespace
}  // namespace overspill
