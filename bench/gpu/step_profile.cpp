// What predicts a step: the sections before it, and calls as the step will make them, one by one.
#include <algorithm>

#include "bench/gpu/sections.h"
#include "engine/base/error.h"
#include "engine/bench/bench_host.h"
#include "engine/bench/copy_benchmark.h"
#include "engine/bench/nvme_benchmark.h"
#include "engine/bench/optimizer_benchmark.h"
#include "engine/model/cuda_model.h"
#include "offload/arena.h"

namespace overspill {
namespace {

constexpr uint32_t kBlock = 1;
constexpr uint64_t kPageBytes = 4096;
constexpr uint64_t kSmallChunk = 4096;  // in the caches, of which an update is all latency

/// The step's layers on a GPU of their own, with memory for one block or the head.
class LayerCalls {
 public:
  LayerCalls(const StepCase& step, const StepPlace& place, const BenchProgress& progress)
      : tokens_(step.tokens),
        model_(llama_layers(model_config(step))),
        layers_(make_cuda_model(model_, DType::bf16, {1, tokens_}, place.gpu)),
        state_(make_cuda_state_math(model_)),
        parameters_(std::max(model_.layers[kBlock].padded, model_.layers[model_.head()].padded)),
        host_(kPageBytes + tokens_ * sizeof(int32_t), "targets"),
        device_(make_cuda_device(device_bytes(), place.gpu)),
        pinned_(device_->register_host({host_.memory(), host_.bytes()})),
        bench_(*device_, place.rounds, progress) {
    layers_->attach(*device_, bench_.array<std::byte>(layers_->scratch_bytes()));
    state_->attach(*device_, bench_.array<std::byte>(state_->scratch_bytes()));
    weights_ = bench_.array<uint16_t>(parameters_);
    gradient_ = bench_.array<uint16_t>(parameters_);
    sums_ = bench_.array<float>(parameters_);
    for (uint16_t** values : {&x_, &y_, &dy_}) *values = bench_.array<uint16_t>(values_count());
    bench_.fill_bf16(weights_, parameters_);
    bench_.fill_bf16(x_, values_count());
    bench_.fill_bf16(dy_, values_count());
  }

  void measure(DeviceProfile& device) {
    add_passes();
    add_gradients();
    const std::vector<double> rates = bench_.measure();
    const auto point = [&](OpKind op, uint32_t layer, double rate) {
      return ComputePoint{op, static_cast<double>(model_.layers[layer].parameters),
                          static_cast<double>(tokens_), rate};
    };
    device.compute = {point(OpKind::forward, kBlock, rates[0]),
                      point(OpKind::backward, kBlock, rates[1]),
                      point(OpKind::loss, model_.head(), rates[2])};
    device.reduce_gradient = rates[3];
    device.export_gradient = rates[4];
  }

 private:
  uint64_t values_count() const { return tokens_ * model_.config.hidden_size; }
  uint64_t device_bytes() const {
    constexpr uint64_t kArrays = 8;  // each from a page on
    return layers_->scratch_bytes() + state_->scratch_bytes() + 8 * parameters_ +
           6 * values_count() + kArrays * kPageBytes;
  }

  void add_passes() {
    const auto add = [&](const char* name, auto flops, uint32_t layer,
                         const std::function<void()>& call) {
      bench_.add(name, "GFLOP/s", static_cast<double>(flops(model_, layer, tokens_, tokens_)),
                 call);
    };
    add("step: a block, forward", forward_flops, kBlock,
        [this] { layers_->block(kBlock, weights_, nullptr, x_, y_); });
    add("step: a block, backward", backward_flops, kBlock, [this] {
      layers_->block_backward(kBlock, weights_, nullptr, x_, dy_, sums_, /*first=*/false);
    });
    add("step: the loss", backward_flops, model_.head(), [this] {
      const Model::Head head{.weights = weights_,
                             .embedding = nullptr,
                             .sums = sums_,
                             .embedding_sums = nullptr,
                             .first = false};
      layers_->loss(head, x_, targets(), 1.0f / static_cast<float>(tokens_), dy_, total());
    });
  }

  void add_gradients() {
    const uint64_t size = model_.layers[kBlock].padded;
    const auto elements = static_cast<double>(size);
    bench_.add("step: squares of a gradient", "G elements/s", elements,
               [this, size] { state_->square_sum(kBlock, sums_, 0, size, total()); });
    bench_.add("step: a gradient to bf16", "G elements/s", elements,
               [this, size] { state_->round_gradient(sums_, gradient_, size); });
  }

  double* total() const { return reinterpret_cast<double*>(host_.memory()); }
  const int32_t* targets() const {
    return reinterpret_cast<const int32_t*>(host_.memory() + kPageBytes);
  }

  const uint64_t tokens_;
  const ModelShape model_;
  const std::unique_ptr<Model> layers_;
  const std::unique_ptr<StateMath> state_;
  const uint64_t parameters_;  ///< of the larger layer
  const Arena host_;
  const std::unique_ptr<CudaDevice> device_;
  const HostRegistration pinned_;
  GpuBench bench_;
  uint16_t *weights_ = nullptr, *gradient_ = nullptr;
  float* sums_ = nullptr;
  uint16_t *x_ = nullptr, *y_ = nullptr, *dy_ = nullptr;
};

/// AdamW's with float32 moments, which the step does.
void measure_updates(const StepCase& step, const RoundOptions& options,
                     const BenchProgress& progress, HostProfile& host) {
  choose_run_groups(read_machine());
  OptimizerBenchOptions sizes;
  sizes.parameters = step.update_parameters;
  sizes.chunk_parameters = std::min(sizes.chunk_parameters, sizes.parameters);
  const UpdateWorks works(sizes);
  const OptimizerSettings rule{};
  std::vector<BenchTask> tasks;
  for (const uint64_t parameters : {sizes.chunk_parameters, kSmallChunk}) {
    tasks.push_back({.name = parameters == kSmallChunk ? "step: update of a small chunk"
                                                       : "step: update of a chunk",
                     .unit = "G parameters/s",
                     .works = {works.update(rule, parameters)},
                     .prepare = works.first_step(rule)});
  }
  const std::atomic<bool> stop{false};
  const auto rates = BenchRounds(options, tasks.size(), stop, progress).measure(tasks);
  host.updates = {{rule.kind, rule.state, rates[0][0]}};
  host.update_latency = static_cast<double>(kSmallChunk) / rates[1][0];
}

DrivesProfile measure_drives(const StepCase& step, const StepPlace& place,
                             const BenchProgress& progress) {
  NvmeBenchOptions options;
  options.paths = place.drives;
  options.bytes_per_path = step.drive_bytes;
  options.seconds_per_point = place.drive_seconds;
  options.block_sizes = {std::min(4 * kMiB, step.drive_bytes / 64)};
  options.depths = {4, 8};
  options.sequential = false;
  options.verify = true;
  const std::atomic<bool> stop{false};
  return to_profile(run_nvme_benchmark(options, stop, progress));
}

}  // namespace

ModelConfig model_config(const StepCase& step) {
  ModelConfig config;
  config.hidden_size = step.hidden;
  config.intermediate_size = step.intermediate;
  config.num_hidden_layers = step.layers;
  config.num_attention_heads = step.heads;
  config.num_key_value_heads = step.kv_heads;
  config.head_dim = step.head_dim;
  config.vocab_size = step.vocabulary;
  config.max_position_embeddings = step.tokens;
  return config;
}

HardwareProfile measured_profile(const CudaGpu& gpu, const CopyReport& copies,
                                 const BenchSection& kernels, const BenchSection& gemm) {
  HardwareProfile profile;
  fill_profile(copies, profile);
  DeviceProfile& device = profile.device;
  device.name = gpu.name;
  device.accelerator = true;
  device.memory = gpu.memory_bytes;
  device.memory_bandwidth = kernels.json.at("results").at(0).at("bytes_per_second");
  if (const double fastest = fastest_product(gemm); fastest > 0) device.peak_flops = fastest;
  return profile;
}

void measure_step_rates(const StepCase& step, const StepPlace& place, const BenchProgress& progress,
                        HardwareProfile& profile) {
  LayerCalls(step, place, progress).measure(profile.device);
  measure_updates(step, place.rounds, progress, profile.host);
  if (!place.drives.empty()) profile.drives = measure_drives(step, place, progress);
}

}  // namespace overspill
