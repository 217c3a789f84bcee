// Whole blocks of models, as a run computes them: forward, and backward with its recomputation.
#include <fmt/format.h>

#include <algorithm>

#include "bench/gpu/sections.h"
#include "engine/base/error.h"
#include "engine/base/units.h"
#include "engine/model/cuda_model.h"

namespace overspill {
namespace {

constexpr uint32_t kBlock = 1;  // between the embedding and the head, which are not measured
constexpr uint32_t kWords = 256;

ModelShape model_of(const BlockCase& test) {
  ModelConfig config;
  config.hidden_size = test.hidden;
  config.intermediate_size = test.intermediate;
  config.num_hidden_layers = 1;
  config.num_attention_heads = test.heads;
  config.num_key_value_heads = test.kv_heads;
  config.head_dim = test.head_dim;
  config.vocab_size = kWords;
  config.max_position_embeddings = static_cast<uint32_t>(test.tokens);
  return llama_layers(config);
}

class BlockList {
 public:
  BlockList(GpuBench& bench, double fastest_product) : bench_(bench), fastest_(fastest_product) {}

  void measure(const BlockCase& test) {
    bench_.reset();
    const ModelShape model = model_of(test);
    const auto device =
        make_cuda_model(model, DType::bf16, {1, test.tokens}, bench_.device().gpu());
    const uint64_t parameters = model.layers[kBlock].padded, values = test.tokens * test.hidden;
    const uint64_t needed = 6 * parameters + 6 * values + device->scratch_bytes() + 5 * kPageBytes;
    if (!bench_.fits(needed)) {
      notes_.push_back(
          fmt::format("{}: left out, for it needs {}", test.name, format_bytes(needed)));
      return;
    }
    auto* const weights = bench_.array<uint16_t>(parameters);
    auto* const sums = bench_.array<float>(parameters);
    auto *const x = bench_.array<uint16_t>(values), *const y = bench_.array<uint16_t>(values),
                *const dy = bench_.array<uint16_t>(values);
    bench_.fill_bf16(weights, parameters);
    bench_.fill_bf16(x, values);
    bench_.fill_bf16(dy, values);
    device->attach(bench_.device(), bench_.array<std::byte>(device->scratch_bytes()));
    const auto flops = [&](auto count) {
      return static_cast<double>(count(model, kBlock, test.tokens, test.tokens));
    };
    const double amounts[] = {flops(forward_flops), flops(backward_flops)};
    bench_.add(test.name + ", forward", "GFLOP/s", amounts[0],
               [&] { device->block(kBlock, weights, nullptr, x, y); });
    bench_.add(test.name + ", backward", "GFLOP/s", amounts[1], [&] {
      device->block_backward(kBlock, weights, nullptr, x, dy, sums, /*first=*/false);
    });
    add_row(test, model.layers[kBlock].parameters, amounts, bench_.measure());
  }

  BenchSection section() const {
    return make_section("blocks", "Blocks of models", {&table_, 1}, {}, notes_,
                        {{"fastest_product_flops_per_second", fastest_}, {"results", results_}});
  }

 private:
  static constexpr uint64_t kPageBytes = 4096;

  void add_row(const BlockCase& test, uint64_t parameters, const double (&amounts)[2],
               const std::vector<double>& rates) {
    const double seconds[] = {amounts[0] / rates[0], amounts[1] / rates[1]};
    std::vector<std::string> row = {test.name, std::to_string(test.tokens)};
    for (const size_t i : {0, 1}) {
      row.push_back(fmt::format("{:.2f}", seconds[i] * 1e3));
      row.push_back(tera(rates[i]));
      row.push_back(fastest_ > 0 ? fmt::format("{:.2f}", rates[i] / fastest_) : "-");
    }
    table_.rows.push_back(std::move(row));
    results_.push_back({{"model", test.name},
                        {"tokens", test.tokens},
                        {"parameters", parameters},
                        {"forward_seconds", seconds[0]},
                        {"forward_flops_per_second", rates[0]},
                        {"backward_seconds", seconds[1]},
                        {"backward_flops_per_second", rates[1]}});
  }

  GpuBench& bench_;
  const double fastest_;
  BenchTable table_{.title = "blocks, TFLOP/s and as a share of the fastest product of matrices",
                    .columns = {"model", "tokens", "forward ms", "TFLOP/s", "share", "backward ms",
                                "TFLOP/s", "share"},
                    .rows = {}};
  nlohmann::ordered_json results_ = nlohmann::ordered_json::array();
  std::vector<std::string> notes_;
};

BenchSection no_blocks(const std::string& why) {
  const std::string note = "no blocks: " + why;
  return make_section("blocks", "Blocks of models", {}, {}, {&note, 1}, {{"absence", why}});
}

}  // namespace

double fastest_product(const BenchSection& gemm) {
  double fastest = 0;
  for (const auto& result : gemm.json.value("results", nlohmann::ordered_json::array())) {
    for (const char* product : {"forward", "input_gradient", "weight_gradient"}) {
      fastest =
          std::max(fastest, result.at(std::string(product) + "_flops_per_second").get<double>());
    }
  }
  return fastest;
}

BenchSection blocks_section(GpuBench& bench, const GpuBenchSizes& sizes, double fastest_product) {
  BlockList list(bench, fastest_product);
  try {
    for (const BlockCase& test : sizes.blocks) list.measure(test);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::not_found) throw;
    return no_blocks(error.what());
  }
  return list.section();
}

}  // namespace overspill
