// The three products of a linear layer at the shapes of models.
#include <fmt/format.h>

#include <optional>

#include "bench/gpu/sections.h"
#include "engine/base/error.h"
#include "engine/model/cuda_gemm.h"

namespace overspill {
namespace {

using cuda::GemmPlans;
using cuda::GemmProduct;

constexpr cuda::GemmTypes kNarrow{DType::bf16, DType::bf16}, kWide{DType::bf16, DType::f32};

/// An operand or result of each side of a product: x, w, y and a gradient of w in float32.
struct Matrices {
  void *x, *w, *y;
  float* dw;
};

uint64_t bytes_of(const LinearShape& s) {
  return 2 * (s.rows * s.in + s.out * s.in + s.rows * s.out) + 4 * s.out * s.in + 4 * 256;
}

/// Adds the shape's products; false when they do not fit.
bool add_products(GpuBench& bench, GemmPlans& plans, const LinearCase& test) {
  const LinearShape& s = test.shape;
  if (!bench.fits(bytes_of(s))) return false;
  const Matrices m{bench.array<uint16_t>(s.rows * s.in), bench.array<uint16_t>(s.out * s.in),
                   bench.array<uint16_t>(s.rows * s.out), bench.array<float>(s.out * s.in)};
  bench.fill_bf16(m.x, s.rows * s.in);
  bench.fill_bf16(m.w, s.out * s.in);
  bench.fill_bf16(m.y, s.rows * s.out);
  const double flops =
      2.0 * static_cast<double>(s.rows) * static_cast<double>(s.in) * static_cast<double>(s.out);
  const auto add = [&](const char* product, const std::function<void()>& launch) {
    bench.add(fmt::format("{}, {}", test.name, product), "GFLOP/s", flops, launch);
  };
  const cudaStream_t stream = bench.stream();
  add("forward", [=, &plans] { plans.linear(stream, s, kNarrow, m.x, m.w, m.y); });
  add("input gradient",
      [=, &plans] { plans.linear_input_gradient(stream, s, kNarrow, m.y, m.w, m.x); });
  add("weight gradient",
      [=, &plans] { plans.linear_weight_gradient(stream, s, kWide, m.y, m.x, m.dw, m.dw); });
  return true;
}

BenchSection no_gemm(const std::string& why) {
  const std::string note = "no products of matrices: " + why;
  return make_section("gemm", "Products of matrices", {}, {}, {&note, 1}, {{"absence", why}});
}

}  // namespace

BenchSection gemm_section(GpuBench& bench, const GpuBenchSizes& sizes) {
  std::optional<cuda::BlasLibrary> library;
  try {
    library = cuda::open_blas_library();
  } catch (const Error& error) {
    return no_gemm(error.what());
  }
  GemmPlans plans(*library, cuda::kGemmWorkspaceBytes);
  BenchTable table{.title = "products of bf16 matrices, TFLOP/s",
                   .columns = {"projection", "rows", "in", "out", "forward", "input gradient",
                               "weight gradient"},
                   .rows = {}};
  nlohmann::ordered_json results = nlohmann::ordered_json::array();
  std::vector<std::string> notes;
  for (const LinearCase& test : sizes.linears) {
    const LinearShape& s = test.shape;
    bench.reset();
    plans.prepare(GemmProduct::linear, s, kNarrow);
    plans.prepare(GemmProduct::input_gradient, s, kNarrow);
    plans.prepare(GemmProduct::weight_gradient, s, kWide);
    plans.use_workspace(bench.array<std::byte>(plans.workspace_bytes()), plans.workspace_bytes());
    if (!add_products(bench, plans, test)) {
      notes.push_back(test.name + ": left out, larger than the memory that the benchmark took");
      continue;
    }
    const std::vector<double> rates = bench.measure();
    table.rows.push_back({test.name, std::to_string(s.rows), std::to_string(s.in),
                          std::to_string(s.out), tera(rates[0]), tera(rates[1]), tera(rates[2])});
    results.push_back({{"projection", test.name},
                       {"rows", s.rows},
                       {"in", s.in},
                       {"out", s.out},
                       {"forward_flops_per_second", rates[0]},
                       {"input_gradient_flops_per_second", rates[1]},
                       {"weight_gradient_flops_per_second", rates[2]}});
  }
  return make_section("gemm", "Products of matrices", {&table, 1}, {}, notes,
                      {{"results", results}});
}

}  // namespace overspill
