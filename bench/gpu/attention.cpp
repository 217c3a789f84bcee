// Attention on tensor cores by cuDNN, and the portable kernel beside it.
#include <fmt/format.h>

#include <optional>

#include "bench/gpu/sections.h"
#include "engine/model/cuda_dnn_attention.h"
#include "engine/model/cuda_kernels.h"

namespace overspill {
namespace {

using bf16 = __nv_bfloat16;

struct Tensors {
  Tensors(GpuBench& bench, const AttentionShape& s)
      : queries(s.batch * s.sequence_len * s.heads * s.head_dim),
        keys(s.batch * s.sequence_len * s.kv_heads * s.head_dim),
        q(bench.array<bf16>(queries)),
        k(bench.array<bf16>(keys)),
        v(bench.array<bf16>(keys)),
        o(bench.array<bf16>(queries)),
        d_o(bench.array<bf16>(queries)),
        dq(bench.array<bf16>(queries)),
        dk(bench.array<bf16>(keys)),
        dv(bench.array<bf16>(keys)),
        lse(bench.array<float>(s.batch * s.sequence_len * s.heads)) {
    for (bf16* values : {q, o, d_o}) bench.fill_bf16(values, queries);
    for (bf16* values : {k, v}) bench.fill_bf16(values, keys);
  }
  uint64_t queries, keys;
  bf16 *q, *k, *v, *o, *d_o, *dq, *dk, *dv;
  float* lse;
};

/// Of the half of the scores that a causal mask keeps.
double forward_flops(const AttentionShape& s) {
  const auto tokens = static_cast<double>(s.sequence_len);
  return 2 * static_cast<double>(s.batch) * tokens * tokens * s.heads * s.head_dim;
}
constexpr double kBackward = 2.5;  // five products for two

struct Rates {
  double forward = 0, backward = 0;  ///< FLOPs per second; 0: not measured
};

class AttentionList {
 public:
  explicit AttentionList(GpuBench& bench) : bench_(bench) {
    std::string refusal;
    library_ = cuda::open_dnn_library(refusal);
    if (!library_) {
      notes_.push_back("no cuDNN: " + refusal);
      return;
    }
    handle_.emplace(*library_);
    handle_->set_stream(bench.stream());
  }

  void measure(const AttentionCase& test) {
    const Rates cudnn = library_ ? measure_cudnn(test) : Rates{};
    const Rates portable = test.portable ? measure_portable(test) : Rates{};
    const auto cell = [](double rate) { return rate == 0 ? std::string("-") : tera(rate); };
    table_.rows.push_back({test.name, std::to_string(test.shape.heads), cell(cudnn.forward),
                           cell(cudnn.backward), cell(portable.forward), cell(portable.backward)});
    const AttentionShape& s = test.shape;
    results_.push_back({{"name", test.name},
                        {"batch", s.batch},
                        {"tokens", s.sequence_len},
                        {"heads", s.heads},
                        {"kv_heads", s.kv_heads},
                        {"head_dim", s.head_dim},
                        {"cudnn_forward_flops_per_second", cudnn.forward},
                        {"cudnn_backward_flops_per_second", cudnn.backward},
                        {"portable_forward_flops_per_second", portable.forward},
                        {"portable_backward_flops_per_second", portable.backward}});
  }

  BenchSection section() const {
    return make_section("attention", "Attention", {&table_, 1}, {}, notes_,
                        {{"results", results_}});
  }

 private:
  Rates measure_cudnn(const AttentionCase& test) {
    bench_.reset();
    const Tensors t(bench_, test.shape);
    std::string refusal;
    const auto attention =
        cuda::DnnAttention::make(cuda::DnnTarget(*handle_), test.shape, {}, refusal);
    if (!attention) {
      notes_.push_back(fmt::format("{}: cuDNN has no plan: {}", test.name, refusal));
      return {};
    }
    void* const workspace = bench_.array<std::byte>(
        std::max(attention->forward_workspace_bytes(), attention->backward_workspace_bytes()));
    const cuda::DnnAttentionInput input{t.q, t.k, t.v};
    return run(
        test, "cuDNN", [&] { attention->forward(*handle_, input, t.o, t.lse, workspace); },
        [&] {
          attention->backward(*handle_, input, {t.o, t.d_o, t.lse, t.dq, t.dk, t.dv}, workspace);
        });
  }

  Rates measure_portable(const AttentionCase& test) {
    bench_.reset();
    const AttentionShape& s = test.shape;
    const Tensors t(bench_, s);
    void* const workspace =
        bench_.array<std::byte>(cuda::attention_gradient_workspace_bytes(test.shape));
    return run(
        test, "portable",
        [&] { cuda::attention(bench_.stream(), s, nullptr, t.q, t.k, t.v, t.o, t.lse); },
        [&] {
          cuda::attention_gradient(bench_.stream(), s, nullptr, t.q, t.k, t.v, t.o, t.lse, t.d_o,
                                   t.dq, t.dk, t.dv, workspace);
        });
  }

  Rates run(const AttentionCase& test, const char* which, const std::function<void()>& forward,
            const std::function<void()>& backward) {
    const double flops = forward_flops(test.shape);
    bench_.add(fmt::format("{}, {}, forward", test.name, which), "GFLOP/s", flops, forward);
    bench_.add(fmt::format("{}, {}, backward", test.name, which), "GFLOP/s", kBackward * flops,
               backward);
    const std::vector<double> rates = bench_.measure();
    return {rates[0], rates[1]};
  }

  GpuBench& bench_;
  std::optional<cuda::DnnLibrary> library_;
  std::optional<cuda::DnnHandle> handle_;
  BenchTable table_{
      .title = "causal attention, TFLOP/s",
      .columns = {"model", "heads", "cuDNN forward", "backward", "portable forward", "backward"},
      .rows = {}};
  nlohmann::ordered_json results_ = nlohmann::ordered_json::array();
  std::vector<std::string> notes_;
};

}  // namespace

BenchSection attention_section(GpuBench& bench, const GpuBenchSizes& sizes) {
  AttentionList list(bench);
  for (const AttentionCase& test : sizes.attentions) list.measure(test);
  return list.section();
}

}  // namespace overspill
