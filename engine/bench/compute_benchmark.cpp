// Activations and gradients are those of one micro-batch; weights are random, small, and cycle.
#include "engine/bench/compute_benchmark.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "engine/base/error.h"
#include "engine/base/parallel.h"
#include "engine/base/random.h"

namespace overspill {
namespace {

constexpr uint32_t kHeadDim = 64, kQueriesPerKey = 4;
constexpr OpKind kOps[] = {OpKind::forward, OpKind::backward, OpKind::loss};

uint32_t layer_of(OpKind op, const ModelShape& model) {
  return op == OpKind::loss ? model.head() : 1;
}

/// In turn the places in memory where so much fits.
class Turns {
 public:
  Turns(std::byte* memory, uint64_t bytes, uint64_t each)
      : memory_(memory), each_(each), count_(bytes / each) {
    CHECK(count_ > 0);
  }
  std::byte* next() { return memory_ + turn_++ % count_ * each_; }

 private:
  std::byte* memory_;
  uint64_t each_, count_, turn_ = 0;
};

const char* op_label(OpKind op) {
  return op == OpKind::forward ? "forward" : op == OpKind::backward ? "backward" : "loss";
}

}  // namespace

ModelShape bench_model(uint32_t hidden, uint32_t vocabulary) {
  ModelConfig config;
  config.hidden_size = hidden;
  config.intermediate_size = static_cast<uint32_t>(round_up(hidden * 8 / 3, 256));
  config.num_hidden_layers = 1;
  config.num_attention_heads = hidden / kHeadDim;
  config.num_key_value_heads = config.num_attention_heads / kQueriesPerKey;
  config.head_dim = kHeadDim;
  config.vocab_size = vocabulary;
  return llama_layers(config);
}

struct ComputeWorks::Memory {
  Memory(uint64_t weight_bytes, uint64_t activations, uint64_t outputs, uint64_t sums,
         uint64_t scratch_bytes)
      : weights(weight_bytes, "weights"),
        x(activations * sizeof(float), "activations"),
        dy(activations * sizeof(float), "gradients"),
        y(outputs * sizeof(float), "outputs"),
        sums(sums * sizeof(float), "gradient sums"),
        scratch(scratch_bytes, "scratch") {
    fill_bf16(reinterpret_cast<uint16_t*>(weights.memory()), weight_bytes / 2, 0.02f);
    fill_floats(floats(x), activations, 1.0f);
    fill_floats(floats(dy), activations, 1e-3f);
  }
  static float* floats(const Arena& arena) { return reinterpret_cast<float*>(arena.memory()); }

  Arena weights, x, dy, y, sums, scratch;
};

ComputeWorks::ComputeWorks(const ComputeBenchOptions& options) {
  uint64_t largest = 0, scratch = 0;
  for (const uint32_t hidden : options.hidden_sizes) {
    CHECK(hidden % (kHeadDim * kQueriesPerKey) == 0);
    const ModelShape model = bench_model(hidden, options.vocabulary);
    for (const LayerShape& layer : model.layers) largest = std::max(largest, layer.padded);
    for (const uint32_t tokens : options.tokens) {
      auto llama =
          std::make_unique<Llama>(model, DType::bf16, BatchShape{1, tokens}, host_kernels());
      scratch = std::max(scratch, llama->scratch_bytes());
      shapes_.push_back({hidden, tokens, std::move(llama)});
    }
  }
  const uint64_t tokens = std::ranges::max(options.tokens);
  const uint32_t hidden = std::ranges::max(options.hidden_sizes);
  const ModelConfig& widest = shape(hidden, options.tokens.front()).llama->model().config;
  const uint64_t features = std::max({hidden, widest.intermediate_size, widest.vocab_size});
  memory_ = std::make_unique<Memory>(std::max(options.weight_bytes, 2 * largest),
                                     tokens * widest.intermediate_size, tokens * features, largest,
                                     scratch);
  for (uint64_t i = 0; i < tokens; ++i) {
    targets_.push_back(static_cast<int32_t>(random_below(2, i, options.vocabulary)));
  }
}

ComputeWorks::~ComputeWorks() = default;

const ComputeWorks::Shape& ComputeWorks::shape(uint32_t hidden, uint32_t tokens) const {
  const auto found = std::ranges::find_if(
      shapes_, [&](const Shape& s) { return s.hidden == hidden && s.tokens == tokens; });
  CHECK(found != shapes_.end());
  return *found;
}

BenchTask ComputeWorks::task(OpKind op, uint32_t hidden, uint32_t tokens) const {
  Llama* const llama = shape(hidden, tokens).llama.get();
  const ModelShape& model = llama->model();
  const uint32_t layer = layer_of(op, model);
  const uint64_t flops = op == OpKind::forward ? forward_flops(model, layer, tokens, tokens)
                                               : backward_flops(model, layer, tokens, tokens);
  Turns weights(memory_->weights.memory(), memory_->weights.bytes(),
                2 * model.layers[layer].padded);
  float *const x = Memory::floats(memory_->x), *const y = Memory::floats(memory_->y);
  const float* const dy = Memory::floats(memory_->dy);
  float* const sums = Memory::floats(memory_->sums);
  const int32_t* const targets = targets_.data();
  // A layer's gradients add up over two micro-batches.
  const auto run = [=, first = false]() mutable {
    const std::byte* const w = weights.next();
    first = !first;
    if (op == OpKind::forward) return llama->block(layer, w, nullptr, x, y);
    if (op == OpKind::loss) {
      const Llama::Head head{.weights = w,
                             .embedding = nullptr,
                             .sums = sums,
                             .embedding_sums = nullptr,
                             .first = first};
      llama->loss(head, x, targets, 1.0f / static_cast<float>(tokens), y);
      return;
    }
    std::memcpy(y, dy, sizeof(float) * tokens * hidden);  // becomes the gradient of x
    llama->block_backward(layer, w, nullptr, x, y, sums, first);
  };
  return {.name = fmt::format("{}, hidden {}, {} tokens", op_label(op), hidden, tokens),
          .unit = "GFLOP/s",
          .works = {{static_cast<double>(flops), run}},
          // The shapes share their scratch, and each has tables of its own in it.
          .prepare = [llama, scratch = memory_->scratch.memory()] { llama->set_scratch(scratch); }};
}

BenchTask ComputeWorks::product(const std::string& name, const GemmPoint& g) const {
  Turns weights(memory_->weights.memory(), memory_->weights.bytes(), 2 * g.n * g.k);
  const KernelScratch scratch{memory_->scratch.memory()};
  const float* const x = Memory::floats(memory_->x);
  float* const y = Memory::floats(memory_->y);
  const LinearShape shape{.rows = g.m, .in = g.k, .out = g.n};
  return {.name = fmt::format("{} product, {} x {} x {}", name, g.m, g.n, g.k),
          .unit = "GFLOP/s",
          .works = {{2.0 * static_cast<double>(g.m * g.n * g.k), [=]() mutable {
                       host_kernels().linear(scratch, shape, x, {weights.next(), DType::bf16}, y,
                                             /*accumulate=*/false);
                     }}}};
}

ComputeReport run_compute_benchmark(const ComputeBenchOptions& options,
                                    const std::atomic<bool>& stop, const BenchProgress& progress) {
  choose_run_groups(read_machine());
  const ComputeWorks works(options);
  ComputeReport report;
  report.threads = parallel_threads();
  report.vocabulary = options.vocabulary;
  std::vector<BenchTask> tasks;
  for (const uint32_t hidden : options.hidden_sizes) {
    const ModelShape model = bench_model(hidden, options.vocabulary);
    for (const uint32_t tokens : options.tokens) {
      for (const OpKind op : kOps) {
        tasks.push_back(works.task(op, hidden, tokens));
        // The head's norm has next to none, and forward_flops counts its projection only.
        const double parameters = static_cast<double>(model.layers[layer_of(op, model)].parameters);
        report.layers.push_back({hidden, {op, parameters, static_cast<double>(tokens), 0}});
      }
    }
  }
  for (const uint32_t hidden : options.hidden_sizes) {
    const uint64_t ffn = bench_model(hidden, options.vocabulary).config.intermediate_size;
    const std::tuple<const char*, uint64_t, uint64_t> projections[] = {
        {"query", hidden, hidden},
        {"gate", ffn, hidden},
        {"down", hidden, ffn},
        {"head", options.vocabulary, hidden}};
    for (const uint32_t tokens : options.tokens) {
      for (const auto& [name, n, k] : projections) {
        report.products.push_back({name, {.m = tokens, .n = n, .k = k}});
        tasks.push_back(works.product(name, report.products.back().point));
      }
    }
  }
  BenchRounds rounds(options.rounds, tasks.size(), stop, progress);
  const auto rates = rounds.measure(tasks);
  size_t next = 0;
  for (LayerRate& layer : report.layers) layer.point.flops_per_second = rates[next++][0];
  for (ProductRate& product : report.products) product.point.flops_per_second = rates[next++][0];
  return report;
}

double ComputeReport::peak_flops() const {
  double most = 0;
  for (const LayerRate& layer : layers) most = std::max(most, layer.point.flops_per_second);
  for (const ProductRate& one : products) most = std::max(most, one.point.flops_per_second);
  return most;
}

}  // namespace overspill
