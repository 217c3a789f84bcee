// What the C API's calls cost beside the computing of the layers: blocks of a Llama with 85 million
// parameters, all state in memory, one micro-batch a step.
#include <fmt/format.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "bindings/include/overspill.h"
#include "engine/model/llama.h"

namespace {

using namespace overspill;
using Clock = std::chrono::steady_clock;

constexpr uint32_t kBlocks = 12, kHidden = 768, kSteps = 5;

double since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// Seconds inside the API, of all calls.
double in_api = 0;

template <class Call>
void timed(const Call& call) {
  const auto start = Clock::now();
  const osp_status_t status = call();
  in_api += since(start);
  if (status == OSP_SUCCESS) return;
  fmt::print(stderr, "{}: {}\n", osp_status_string(status), osp_last_error());
  std::exit(1);
}

ModelShape blocks() {
  ModelConfig config;
  config.hidden_size = kHidden;
  config.intermediate_size = 2048;
  config.num_hidden_layers = kBlocks;
  config.num_attention_heads = config.num_key_value_heads = 12;
  config.head_dim = 64;
  config.vocab_size = 256;
  config.max_position_embeddings = 4096;
  return llama_layers(config);
}

osp_engine_t make_engine(const ModelShape& model) {
  osp_engine_t engine = nullptr;
  timed([&] {
    return osp_engine_create(
        "precision: float32\noffload: {device_memory: 1GiB, host_memory: 1GiB}", nullptr, &engine);
  });
  for (uint32_t b = 1; b <= kBlocks; ++b) {
    std::vector<osp_tensor_t> tensors;
    for (const LayerTensor& tensor : model.layers[b].tensors) {
      osp_tensor_t given = OSP_TENSOR_INIT;
      given.name = tensor.name.c_str();
      given.shape = tensor.shape.data();
      given.rank = static_cast<uint32_t>(tensor.shape.size());
      tensors.push_back(given);
    }
    const std::string name = std::to_string(b);
    timed([&] {
      return osp_layer_register(engine, name.c_str(), tensors.data(), tensors.size(), nullptr);
    });
  }
  timed([&] { return osp_finalize(engine, nullptr); });
  timed([&] { return osp_initialize_weights(engine, 1, 0.02); });
  return engine;
}

}  // namespace

int main(int argc, char** argv) {
  const uint64_t tokens = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 512;
  const ModelShape model = blocks();
  Llama llama(model, DType::f32, {1, tokens}, host_kernels());
  std::unique_ptr<void, decltype(&std::free)> scratch(
      std::aligned_alloc(4096, llama.scratch_bytes()), &std::free);
  llama.set_scratch(static_cast<std::byte*>(scratch.get()));
  osp_engine_t engine = make_engine(model);

  std::vector<std::vector<float>> x(kBlocks + 2, std::vector<float>(tokens * kHidden, 0.1f));
  std::vector<float> sums(model.layers[1].padded);
  osp_step_options_t rates = OSP_STEP_OPTIONS_INIT;
  rates.learning_rate = 1e-4;
  double total = 0;
  for (uint32_t step = 0; step <= kSteps; ++step) {
    if (step == 1) in_api = total = 0;  // the first one settles
    const auto start = Clock::now();
    const void* weights[kBlockTensors] = {};
    for (uint32_t l = 0; l < kBlocks; ++l) {
      timed([&] { return osp_acquire(engine, l, nullptr, weights, kBlockTensors); });
      llama.block(l + 1, weights[0], nullptr, x[l].data(), x[l + 1].data());
      timed([&] { return osp_release(engine, l, nullptr); });
    }
    for (uint32_t l = kBlocks; l-- > 0;) {
      timed([&] { return osp_acquire(engine, l, nullptr, weights, kBlockTensors); });
      llama.block_backward(l + 1, weights[0], nullptr, x[l].data(), x.back().data(), sums.data(),
                           true);
      timed([&] {
        return osp_submit_gradients(engine, l, sums.data(), OSP_FLOAT32, sums.size(), nullptr);
      });
      timed([&] { return osp_release(engine, l, nullptr); });
    }
    timed([&] { return osp_step(engine, &rates); });
    total += since(start);
  }
  osp_statistics_t statistics = OSP_STATISTICS_INIT;
  osp_get_statistics(engine, &statistics);
  fmt::print(
      "{:.1f} M parameters, {} tokens: {:.3f} s a step, {:.4f} s in the API ({:.2f} %), of which "
      "{:.4f} s waiting for updates\n",
      static_cast<double>(kBlocks * model.layers[1].parameters) / 1e6, tokens, total / kSteps,
      in_api / kSteps, 100 * in_api / total, statistics.acquire_wait_seconds / (kSteps + 1));
  osp_engine_destroy(engine);
}
