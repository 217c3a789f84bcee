// RMSNorm, alone and with the residual's addition, and its gradient against float64. Bounds: 2^-20
// of the largest for sums over rows of up to 16384, and half a unit of bf16's last place where that
// is stored.
#include "engine/model/cuda_kernels.h"
#include "tests/emulation/kernel_fixture.h"

namespace overspill {
namespace {

using namespace test;

class NormKernels : public KernelTest {};
INSTANTIATE_SEEDS(NormKernels);

constexpr float kEpsilon = 1e-5f;
constexpr Bound kSums{0x1p-21, 0x1p-20, 0x1p-22};  // absolute for d = 1, whose terms cancel

struct Case {
  size_t rows, d, misalign = 0;
};
const Case kCases[] = {{1, 1}, {1, 8}, {3, 7}, {17, 64}, {9, 1037}, {2, 2056}, {4, 136, 1}};

double root_of(const Doubles& x, size_t row, size_t d) {
  double squares = 0;
  for (size_t i = row * d; i < (row + 1) * d; ++i) squares += x[i] * x[i];
  return 1 / std::sqrt(squares / double(d) + kEpsilon);
}

template <class T>
void check_forward(const Case& c) {
  const size_t misalign = c.misalign * sizeof(T), size = c.rows * c.d;
  const Array<T> x = normals<T>(1, size, 3, misalign), w = normals<T>(2, c.d, 1, misalign);
  const Array<T> y(size, misalign);
  const Array<float> rstd(c.rows);
  cuda::rms_norm(nullptr, x.data(), w.data(), kEpsilon, y.data(), rstd.data(), c.rows, c.d);
  const Doubles values = x.values(), weight = w.values();
  Doubles want_y, want_rstd;
  for (size_t r = 0; r < c.rows; ++r) {
    want_rstd.push_back(root_of(values, r, c.d));
    for (size_t i = 0; i < c.d; ++i) {
      want_y.push_back(values[r * c.d + i] * want_rstd[r] * weight[i]);
    }
  }
  expect_close(rstd, want_rstd, {0x1p-21, 0});
  expect_close(y, want_y, {0x1p-20, 0});
}

TEST_P(NormKernels, Forward) {
  for (const Case& c : kCases) {
    check_forward<float>(c);
    check_forward<bf16>(c);
  }
}

template <class T>
struct Gradient {
  Case c;
  Array<T> x, w, dy;
  Array<float> rstd;
  explicit Gradient(const Case& shape)
      : c(shape),
        x(normals<T>(1, c.rows * c.d, 3, c.misalign * sizeof(T))),
        w(normals<T>(2, c.d, 1, c.misalign * sizeof(T))),
        dy(normals<T>(3, c.rows * c.d, 1, c.misalign * sizeof(T))),
        rstd(c.rows) {
    const Doubles xs = x.values();
    for (size_t r = 0; r < c.rows; ++r) rstd[r] = static_cast<float>(root_of(xs, r, c.d));
  }
  /// dx without what was there, then dw.
  std::pair<Doubles, Doubles> reference() const {
    const Doubles xs = x.values(), ws = w.values(), dys = dy.values();
    Doubles dx(xs.size()), dw(c.d);
    for (size_t r = 0; r < c.rows; ++r) {
      const double root = rstd[r];
      double dot = 0;
      for (size_t i = 0; i < c.d; ++i) dot += dys[r * c.d + i] * ws[i] * xs[r * c.d + i];
      for (size_t i = 0; i < c.d; ++i) {
        const size_t at = r * c.d + i;
        dw[i] += dys[at] * xs[at] * root;
        dx[at] = root * (ws[i] * dys[at] - xs[at] * root * root * dot / double(c.d));
      }
    }
    return {dx, dw};
  }
};

template <class T>
void check_gradient(const Case& c, bool accumulate) {
  const Gradient<T> g(c);
  const Array<T> dx = accumulate ? normals<T>(4, g.x.size(), 1, c.misalign * sizeof(T))
                                 : Array<T>(g.x.size(), c.misalign * sizeof(T));
  const Array<float> dw = accumulate ? normals<float>(5, c.d) : Array<float>(c.d);
  const Array<std::byte> workspace(cuda::rms_norm_gradient_workspace_bytes(c.rows, c.d));
  auto [want_dx, want_dw] = g.reference();
  const Doubles dx_before = dx.values(), dw_before = dw.values();
  for (size_t i = 0; accumulate && i < want_dx.size(); ++i) want_dx[i] += dx_before[i];
  for (size_t i = 0; accumulate && i < c.d; ++i) want_dw[i] += dw_before[i];
  cuda::rms_norm_gradient(nullptr, g.x.data(), g.w.data(), g.rstd.data(), g.dy.data(), dx.data(),
                          dw.data(), workspace.data(), {accumulate, accumulate}, c.rows, c.d);
  expect_close(dx, want_dx, kSums);
  expect_close(dw, want_dw, kSums);
}

TEST_P(NormKernels, Gradient) {
  for (const Case& c : kCases) {
    for (const bool accumulate : {false, true}) {
      check_gradient<float>(c, accumulate);
      check_gradient<bf16>(c, accumulate);
    }
  }
}

TEST_P(NormKernels, GradientOfWideRowsSumsInTheWorkspace) {
  check_gradient<bf16>({9, 12008}, false);
  check_gradient<float>({9, 12001}, true);
}

TEST_P(NormKernels, GradientOfManyRows) { check_gradient<bf16>({200, 16}, true); }

TEST_P(NormKernels, GradientWithoutTheWeights) {
  const Gradient<bf16> g({5, 72});
  const Array<bf16> dx(g.x.size());
  cuda::rms_norm_gradient<bf16>(nullptr, g.x.data(), g.w.data(), g.rstd.data(), g.dy.data(),
                                dx.data(), nullptr, nullptr, {false, false}, 5, 72);
  expect_close(dx, g.reference().first, kSums);
}

}  // namespace
}  // namespace overspill
