// Matrix products of GemmPlans against sums in float64, on the fake cuBLASLt or, on a GPU, on
// NVIDIA's own.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "engine/base/error.h"
#include "engine/model/cuda_gemm.h"
#include "tests/emulation/fake_cublaslt.h"
#include "tests/emulation/test_tensor.h"

namespace overspill::cuda {
namespace {

enum class Addend { none, itself, other };

struct Case {
  LinearShape shape;
  GemmTypes types;
  Addend addend;
};

const GemmTypes kBf16ToBf16{DType::bf16, DType::bf16}, kBf16ToFloat{DType::bf16, DType::f32},
    kFloatToFloat{DType::f32, DType::f32};

/// Sum over k of left(i, k) right(k, j), and of their absolute values.
struct Reference {
  double value = 0.0, magnitude = 0.0;
};

template <class Left, class Right>
Reference dot(uint64_t count, const Left& left, const Right& right) {
  Reference sum;
  for (uint64_t k = 0; k < count; ++k) {
    sum.value += left(k) * right(k);
    sum.magnitude += std::abs(left(k) * right(k));
  }
  return sum;
}

class GemmBase : public testing::Test {
 protected:
  void SetUp() override {
    if (!test::kOnGpu) setenv("OVERSPILL_CUBLASLT_LIBRARY", OVERSPILL_FAKE_CUBLASLT, 1);
    library_ = open_blas_library();
  }

  /// Plans with their workspace.
  struct Planned {
    explicit Planned(const BlasLibrary& library)
        : workspace(DType::f32, 4096), plans(library, workspace.bytes()) {
      plans.use_workspace(workspace.get(), workspace.bytes());
    }
    TestTensor workspace;
    GemmPlans plans;
  };

  BlasLibrary library_{};
};

/// With the fake's own functions, which make it fail and show what it was asked.
class Gemm : public GemmBase {
 protected:
  void SetUp() override {
    if (test::kOnGpu) GTEST_SKIP() << "only the fake cuBLASLt can be told to fail";
    GemmBase::SetUp();
    fake_ = dlopen(OVERSPILL_FAKE_CUBLASLT, RTLD_NOW);
    ASSERT_NE(fake_, nullptr);
  }
  void TearDown() override {
    if (!fake_) return;
    ask<void(int)>("fake_cublaslt_fail_product")(0);
    ask<void(bool)>("fake_cublaslt_find_nothing")(false);
    ask<void(FakeCublasLtEnqueue)>("fake_cublaslt_set_enqueue")(nullptr);
    EXPECT_EQ(ask<int()>("fake_cublaslt_live_objects")(), 0);
  }
  template <class F>
  F* ask(const char* name) {
    return reinterpret_cast<F*>(dlsym(fake_, name));
  }
  std::string last_error() { return ask<const char*()>("fake_cublaslt_last_error")(); }

  void* fake_ = nullptr;
};

/// Rounding of float32 sums of `count` terms in any order, and of the result.
double bound(const Reference& sum, uint64_t count, DType result) {
  const double sums = static_cast<double>(count + 1) * std::ldexp(sum.magnitude, -24);
  return sums + std::ldexp(std::abs(sum.value) + sums, result == DType::bf16 ? -8 : -23);
}

using Term = std::function<Reference(uint64_t)>;

void expect_near(const TestTensor& result, const TestTensor* addend, uint64_t count, DType type,
                 const Term& term) {
  for (uint64_t i = 0; i < result.size(); ++i) {
    Reference sum = term(i);
    if (addend) {
      sum.value += (*addend)[i];
      sum.magnitude += std::abs((*addend)[i]);
    }
    ASSERT_NEAR(result[i], sum.value, bound(sum, count, type)) << "element " << i;
  }
}

class GemmShapes : public GemmBase, public testing::WithParamInterface<LinearShape> {
 protected:
  /// The memory that the addend comes from, with a copy of what it holds.
  struct Sum {
    Sum(const Case& of, uint64_t size)
        : result(of.addend == Addend::itself ? TestTensor::random(of.types.result, size, 7)
                                             : TestTensor(of.types.result, size)),
          added(TestTensor::random(of.types.result, size, 7)),
          which(of.addend) {}
    const void* addend() const {
      return which == Addend::none ? nullptr : which == Addend::itself ? result.get() : added.get();
    }
    const TestTensor* expected() const { return which == Addend::none ? nullptr : &added; }
    TestTensor result, added;
    Addend which;
  };
};

/// All types and addends.
std::vector<Case> cases_of(const LinearShape& shape) {
  std::vector<Case> all;
  for (const GemmTypes& types : {kBf16ToBf16, kBf16ToFloat, kFloatToFloat}) {
    for (const Addend addend : {Addend::none, Addend::itself, Addend::other}) {
      all.push_back({shape, types, addend});
    }
  }
  return all;
}

std::string describe(const Case& test) {
  return fmt::format("{} to {}, addend {}", dtype_name(test.types.operands),
                     dtype_name(test.types.result), static_cast<int>(test.addend));
}

TEST_P(GemmShapes, LinearMatchesFloat64) {
  for (const Case& test : cases_of(GetParam())) {
    SCOPED_TRACE(describe(test));
    const auto& [shape, types, addend] = test;
    const TestTensor x = TestTensor::random(types.operands, shape.rows * shape.in, 1);
    const TestTensor w = TestTensor::random(types.operands, shape.out * shape.in, 2);
    Sum sum(test, shape.rows * shape.out);
    Planned planned(library_);
    planned.plans.linear(nullptr, shape, types, x.get(), w.get(), sum.result.get(), sum.addend());
    const uint64_t in = shape.in, out = shape.out;
    expect_near(sum.result, sum.expected(), in, types.result, [&](uint64_t i) {
      return dot(
          in, [&](uint64_t k) { return x[i / out * in + k]; },
          [&](uint64_t k) { return w[i % out * in + k]; });
    });
  }
}

TEST_P(GemmShapes, InputGradientMatchesFloat64) {
  for (const Case& test : cases_of(GetParam())) {
    SCOPED_TRACE(describe(test));
    const auto& [shape, types, addend] = test;
    const TestTensor dy = TestTensor::random(types.operands, shape.rows * shape.out, 3);
    const TestTensor w = TestTensor::random(types.operands, shape.out * shape.in, 4);
    Sum sum(test, shape.rows * shape.in);
    Planned planned(library_);
    planned.plans.linear_input_gradient(nullptr, shape, types, dy.get(), w.get(), sum.result.get(),
                                        sum.addend());
    const uint64_t in = shape.in, out = shape.out;
    expect_near(sum.result, sum.expected(), out, types.result, [&](uint64_t i) {
      return dot(
          out, [&](uint64_t k) { return dy[i / in * out + k]; },
          [&](uint64_t k) { return w[k * in + i % in]; });
    });
  }
}

TEST_P(GemmShapes, WeightGradientMatchesFloat64) {
  for (const Case& test : cases_of(GetParam())) {
    SCOPED_TRACE(describe(test));
    const auto& [shape, types, addend] = test;
    const TestTensor dy = TestTensor::random(types.operands, shape.rows * shape.out, 5);
    const TestTensor x = TestTensor::random(types.operands, shape.rows * shape.in, 6);
    Sum sum(test, shape.out * shape.in);
    Planned planned(library_);
    planned.plans.linear_weight_gradient(nullptr, shape, types, dy.get(), x.get(), sum.result.get(),
                                         sum.addend());
    const uint64_t in = shape.in, out = shape.out;
    expect_near(sum.result, sum.expected(), shape.rows, types.result, [&](uint64_t i) {
      return dot(
          shape.rows, [&](uint64_t k) { return dy[k * out + i / in]; },
          [&](uint64_t k) { return x[k * in + i % in]; });
    });
  }
}

const LinearShape kShapes[] = {{1, 8, 8},    {37, 48, 40}, {16, 64, 24},   {5, 13, 7},
                               {300, 16, 8}, {1, 96, 3},   {2, 16, 128256}};

INSTANTIATE_TEST_SUITE_P(Shapes, GemmShapes, testing::ValuesIn(kShapes), [](const auto& test) {
  return fmt::format("{}x{}x{}", test.param.rows, test.param.in, test.param.out);
});

TEST_F(Gemm, ChoosesAnAlgorithmOncePerShapeAndTypes) {
  Planned planned(library_);
  const auto choices = ask<int()>("fake_cublaslt_choices");
  const int before = choices();
  const LinearShape shape{4, 16, 8};
  planned.plans.prepare(GemmProduct::linear, shape, kBf16ToBf16);
  planned.plans.prepare(GemmProduct::linear, shape, kBf16ToFloat);
  planned.plans.prepare(GemmProduct::weight_gradient, shape, kBf16ToFloat);
  planned.plans.prepare(GemmProduct::linear, {5, 16, 8}, kBf16ToBf16);
  EXPECT_EQ(choices() - before, 4);
  const TestTensor x = TestTensor::random(DType::bf16, 4 * 16, 1);
  const TestTensor w = TestTensor::random(DType::bf16, 8 * 16, 2);
  TestTensor y(DType::bf16, 4 * 8), again(DType::bf16, 4 * 8);
  planned.plans.linear(nullptr, shape, kBf16ToBf16, x.get(), w.get(), y.get());
  planned.plans.linear(nullptr, shape, kBf16ToBf16, x.get(), w.get(), again.get());
  EXPECT_EQ(choices() - before, 4);
  EXPECT_TRUE(y.same_bits(again));
}

TEST_F(Gemm, WorkspaceIsKnownBeforeTheFirstProduct) {
  GemmPlans plans(library_, kGemmWorkspaceBytes);
  EXPECT_EQ(plans.workspace_bytes(), 0u);
  EXPECT_EQ(plans.prepare(GemmProduct::linear, {8, 8, 64}, kBf16ToBf16), 0u);
  const uint64_t needed = plans.prepare(GemmProduct::linear, {8, 512, 8}, kBf16ToBf16);
  EXPECT_GT(needed, 0u);
  EXPECT_EQ(plans.workspace_bytes(), needed);
  GemmPlans without(library_, 0);
  EXPECT_EQ(without.prepare(GemmProduct::linear, {8, 512, 8}, kBf16ToBf16), 0u);
}

TEST_F(Gemm, RefusesAWorkspaceThatIsTooSmall) {
  EXPECT_DEATH(
      {
        GemmPlans plans(library_, kGemmWorkspaceBytes);
        plans.prepare(GemmProduct::linear, {8, 512, 8}, kBf16ToBf16);
        plans.use_workspace(nullptr, 0);
      },
      "needed_bytes_");
}

std::vector<std::pair<void (*)(void*), void*>> queued;

TEST_F(Gemm, ProductsAreOnTheStream) {
  Planned planned(library_);
  queued.clear();
  ask<void(FakeCublasLtEnqueue)>("fake_cublaslt_set_enqueue")(
      [](void* stream, void (*task)(void*), void* argument) {
        EXPECT_EQ(stream, reinterpret_cast<void*>(0x51));
        queued.emplace_back(task, argument);
      });
  const LinearShape shape{3, 8, 8};
  TestTensor x = TestTensor::random(DType::bf16, 3 * 8, 1);
  const TestTensor w = TestTensor::random(DType::bf16, 8 * 8, 2);
  TestTensor y(DType::f32, 3 * 8);
  planned.plans.linear(reinterpret_cast<cudaStream_t>(0x51), shape, kBf16ToFloat, x.get(), w.get(),
                       y.get());
  ASSERT_EQ(queued.size(), 1u);
  EXPECT_TRUE(std::isnan(y[0]));
  queued[0].first(queued[0].second);
  EXPECT_FALSE(std::isnan(y[0]));
}

std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return std::string(error_code_name(error.code())) + ": " + error.what();
  }
  return "no error";
}

TEST_F(Gemm, AFailedProductIsNamed) {
  Planned planned(library_);
  const TestTensor x = TestTensor::random(DType::bf16, 3 * 8, 1);
  const TestTensor w = TestTensor::random(DType::bf16, 8 * 8, 2);
  TestTensor y(DType::f32, 3 * 8);
  ask<void(int)>("fake_cublaslt_fail_product")(1);
  EXPECT_EQ(message_of([&] {
              planned.plans.linear(nullptr, {3, 8, 8}, kBf16ToFloat, x.get(), w.get(), y.get());
            }),
            "io: cuBLASLt cannot multiply (linear of 3 rows, 8 in, 8 out, BF16 to F32): "
            "CUBLAS_STATUS_EXECUTION_FAILED (13)");
}

TEST_F(Gemm, AProductWithoutAlgorithmIsNamed) {
  GemmPlans plans(library_, 0);
  ask<void(bool)>("fake_cublaslt_find_nothing")(true);
  EXPECT_EQ(message_of([&] {
              plans.prepare(GemmProduct::input_gradient, {3, 8, 8}, kBf16ToBf16);
            }),
            "io: cuBLASLt cannot choose an algorithm for a matrix product (linear_input_gradient "
            "of 3 rows, 8 in, 8 out, BF16 to BF16): CUBLAS_STATUS_NOT_SUPPORTED (15)");
}

TEST_F(Gemm, OverlappingMatricesAreCaught) {
  Planned planned(library_);
  const TestTensor x = TestTensor::random(DType::f32, 8 * 8, 1);
  EXPECT_NE(message_of([&] {
              planned.plans.linear(nullptr, {8, 8, 8}, kFloatToFloat, x.get(), x.get(), x.get());
            }).find("CUBLAS_STATUS_INVALID_VALUE"),
            std::string::npos);
  EXPECT_EQ(last_error(), "the result overlaps an operand");
}

TEST_F(Gemm, SaysHowToInstallTheLibrary) {
  setenv("OVERSPILL_CUBLASLT_LIBRARY", "/nowhere/libcublasLt.so", 1);
  const std::string missing = message_of([] { open_blas_library(); });
  EXPECT_NE(missing.find("not_found: cannot open cuBLASLt"), std::string::npos) << missing;
  EXPECT_NE(missing.find("install it"), std::string::npos) << missing;
  setenv("OVERSPILL_CUBLASLT_LIBRARY", "libm.so.6", 1);
  const std::string other = message_of([] { open_blas_library(); });
  EXPECT_NE(other.find("invalid_config: libm.so.6 has no function cublasLt"), std::string::npos)
      << other;
}

}  // namespace
}  // namespace overspill::cuda
