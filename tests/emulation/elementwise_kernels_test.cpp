// Elementwise kernels and the rotation against float64 at sizes around packs and blocks. Bounds:
// a few units of float32's last place, and half a unit of bf16's where that is stored.
#include "engine/model/add_gradient.h"
#include "engine/model/cuda_kernels.h"
#include "tests/emulation/kernel_fixture.h"
#include "tests/unit/engine/model/random_documents.h"

namespace overspill {
namespace {

using namespace test;

class ElementwiseKernels : public KernelTest {};
INSTANTIATE_SEEDS(ElementwiseKernels);

constexpr size_t kSizes[] = {1, 7, 8, 9, 255, 2048, 2049, 5003};
constexpr Bound kFewUnits{8 * 0x1p-24, 0x1p-40};

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

template <class T>
void check_swiglu(size_t size, size_t misalign) {
  const Array<T> gate = normals<T>(1, size, 6, misalign), up = normals<T>(2, size, 1, misalign);
  const Array<T> dy = normals<T>(3, size, 1, misalign), y(size, misalign);
  const Doubles g = gate.values(), u = up.values(), d = dy.values();
  cuda::swiglu(nullptr, gate.data(), up.data(), y.data(), size);
  cuda::swiglu_gradient(nullptr, gate.data(), up.data(), dy.data(), size);
  Doubles want_y, want_gate, want_up;
  for (size_t i = 0; i < size; ++i) {
    const double s = sigmoid(g[i]);
    want_y.push_back(g[i] * s * u[i]);
    want_gate.push_back(d[i] * u[i] * s * (1 + g[i] * (1 - s)));
    want_up.push_back(d[i] * g[i] * s);
  }
  expect_close(y, want_y, kFewUnits);
  expect_close(gate, want_gate, {8 * 0x1p-24, 0x1p-20});  // 1 - sigmoid cancels
  expect_close(up, want_up, kFewUnits);
}

TEST_P(ElementwiseKernels, SwigluAndItsGradient) {
  for (const size_t size : kSizes) {
    check_swiglu<float>(size, 0);
    check_swiglu<bf16>(size, 0);
  }
  check_swiglu<float>(2049, 4);
  check_swiglu<bf16>(2049, 2);
}

TEST_P(ElementwiseKernels, SwigluOfLargeGates) {
  const std::vector<float> gates = {0, 90, -90, 1e30f, -1e30f};
  const Array<float> gate(gates, 0), up(std::vector<float>(5, 0.5f), 0), y(5);
  cuda::swiglu(nullptr, gate.data(), up.data(), y.data(), 5);
  expect_close(y, {0, 45, 0, 0.5 * double{1e30f}, 0}, {0x1p-23, 0});
}

template <class X, class Y>
void check_add(size_t size, size_t misalign) {
  const Array<X> x = normals<X>(1, size, 1, misalign * sizeof(X));
  const Array<Y> y = normals<Y>(2, size, 1, misalign * sizeof(Y));
  const Doubles more = x.values();
  Doubles want = y.values();
  for (size_t i = 0; i < size; ++i) want[i] += more[i];
  cuda::add(nullptr, x.data(), y.data(), size);
  expect_close(y, want, {0x1p-24, 0});
}

TEST_P(ElementwiseKernels, Add) {
  for (const size_t size : {1, 8, 9, 2051}) {
    for (const size_t misalign : {0, 1}) {
      check_add<float, float>(size, misalign);
      check_add<bf16, bf16>(size, misalign);
      check_add<bf16, float>(size, misalign);
    }
  }
}

/// The host's bits.
template <class X>
void check_accumulate(DType type, const Array<X>& x) {
  for (const bool first : {true, false}) {
    const Array<float> sums = normals<float>(2, x.size());
    std::vector<float> want(sums.data(), sums.data() + x.size());
    add_gradient(x.data(), type, want.data(), x.size(), first);
    cuda::accumulate(nullptr, x.data(), sums.data(), x.size(), first);
    EXPECT_EQ(std::memcmp(want.data(), sums.data(), x.size() * sizeof(float)), 0);
  }
}

TEST_P(ElementwiseKernels, AccumulateHasTheHostsBits) {
  for (const size_t size : {1, 8, 9, 2051}) {
    for (const size_t misalign : {0, 2, 4}) {
      if (misalign % 4 == 0) check_accumulate(DType::f32, normals<float>(1, size, 1, misalign));
      check_accumulate(DType::bf16, normals<bf16>(1, size, 1, misalign));
    }
  }
  constexpr size_t kFinite = 0x7c00;  // then infinity and what is no number
  const Array<__half> halves(2 * kFinite);
  for (uint32_t i = 0; i < 2 * kFinite; ++i) {
    const auto bits = static_cast<uint16_t>(i < kFinite ? i : i - kFinite + 0x8000);
    std::memcpy(static_cast<void*>(&halves[i]), &bits, sizeof bits);
  }
  check_accumulate(DType::f16, halves);
}

template <class T>
void check_scale_and_zero() {
  const Array<T> x = normals<T>(1, 2050);
  Doubles want = x.values();
  for (double& value : want) value *= 0.3f;
  cuda::scale(nullptr, x.data(), 0.3f, x.size());
  expect_close(x, want, {0x1p-24, 0});
  cuda::fill_zero(nullptr, x.data(), x.size());
  expect_close(x, Doubles(x.size()), {});
}

TEST_P(ElementwiseKernels, ScaleAndZero) {
  check_scale_and_zero<float>();
  check_scale_and_zero<bf16>();
}

TEST_P(ElementwiseKernels, DocumentEnds) {
  for (const AttentionShape& s :
       {AttentionShape{1, 1, 1, 1, 8}, AttentionShape{3, 43, 1, 1, 8}, {2, 200, 1, 1, 8}}) {
    for (const uint64_t longest : {0, 1, 7, 90}) {
      const std::vector<int32_t> begins = random_documents(s, 3, longest);
      const Array<int32_t> given(begins, 0), ends(begins.size());
      cuda::document_ends(nullptr, given.data(), ends.data(), s.batch, s.sequence_len);
      const std::vector<int32_t> want = document_ends(s, begins);
      for (size_t i = 0; i < want.size(); ++i) ASSERT_EQ(ends[i], want[i]) << i;
    }
  }
}

TEST_P(ElementwiseKernels, Conversions) {
  for (const size_t size : kSizes) {
    for (const size_t misalign : {0, 1}) {
      const Array<float> from = normals<float>(1, size, 1, 4 * misalign);
      const Array<bf16> to(size, 2 * misalign);
      cuda::float_to_bf16(nullptr, from.data(), to.data(), size);
      for (size_t i = 0; i < size; ++i) {
        ASSERT_EQ(static_cast<float>(to[i]), static_cast<float>(__float2bfloat16_rn(from[i])));
      }
      const Array<float> back(size, 4 * misalign);
      cuda::bf16_to_float(nullptr, to.data(), back.data(), size);
      expect_close(back, to.values(), {});
    }
  }
}

TEST_P(ElementwiseKernels, NarrowsInPlace) {
  for (const size_t size : {1, 9, 8191, 8192, 8193, 16384, 16391, 50001}) {
    const Array<float> memory = normals<float>(1, size);
    const Doubles want = memory.values();
    cuda::float_to_bf16(nullptr, memory.data(), reinterpret_cast<bf16*>(memory.data()), size);
    const auto* got = reinterpret_cast<const bf16*>(memory.data());
    for (size_t i = 0; i < size; ++i) {
      const bf16 nearest = __float2bfloat16_rn(static_cast<float>(want[i]));
      ASSERT_EQ(static_cast<float>(got[i]), static_cast<float>(nearest)) << i << " of " << size;
    }
  }
}

template <class T>
void check_rotate(size_t heads, size_t dim, size_t misalign) {
  constexpr size_t kBatch = 2, kLength = 5;
  const size_t half = dim / 2;
  const Array<T> x = normals<T>(1, kBatch * kLength * heads * dim, 1, misalign);
  const Array<float> table(kLength * dim);
  for (size_t t = 0; t < kLength; ++t) {
    for (size_t j = 0; j < half; ++j) {
      const double angle = 0.37 * double(t) / double(j + 1);
      table[t * dim + j] = static_cast<float>(std::cos(angle));
      table[t * dim + half + j] = static_cast<float>(std::sin(angle));
    }
  }
  const Doubles start = x.values();
  Doubles want = start;
  for (size_t row = 0; row < kBatch * kLength * heads; ++row) {
    const float* cosines = table.data() + row / heads % kLength * dim;
    for (size_t j = 0; j < half; ++j) {
      const double a = start[row * dim + j], b = start[row * dim + half + j];
      const double cosine = cosines[j], sine = cosines[half + j];
      want[row * dim + j] = a * cosine - b * sine;
      want[row * dim + half + j] = b * cosine + a * sine;
    }
  }
  cuda::rotate(nullptr, x.data(), table.data(), kBatch, kLength, heads, dim, false);
  expect_close(x, want, {0, 4 * 0x1p-24});
  cuda::rotate(nullptr, x.data(), table.data(), kBatch, kLength, heads, dim, true);
  // Each turn rounds both of a pair: once more where bf16 is stored.
  expect_close(x, start, {0, sizeof(T) == 2 ? 0x1p-8 : 0x1p-21});
}

TEST_P(ElementwiseKernels, RotateTurnsPairsAndBackAgain) {
  for (const size_t dim : {8, 10, 64, 80, 96, 128}) {
    check_rotate<float>(3, dim, 0);
    check_rotate<bf16>(3, dim, 0);
  }
  check_rotate<bf16>(40, 128, 0);
  check_rotate<bf16>(2, 64, 2);
}

}  // namespace
}  // namespace overspill
