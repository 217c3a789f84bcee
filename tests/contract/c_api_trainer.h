// Another trainer, for tests: it computes a Llama on a device of its own, the host or a GPU, in a
// loop of its own, and keeps its state with the engine through overspill.h alone. Reads the native
// trainer's data.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "bindings/include/overspill.h"
#include "engine/base/units.h"
#include "engine/model/cuda_model.h"
#include "engine/model/llama.h"
#include "engine/train/run_setup.h"
#include "engine/train/token_data.h"
#include "offload/cuda_device.h"
#include "tests/contract/devices.h"

namespace overspill::test {

inline void require_success(osp_status_t status, const char* what) {
  if (status == OSP_SUCCESS) return;
  throw std::runtime_error(std::string(what) + ": " + osp_status_string(status) + ": " +
                           osp_last_error());
}
#define OSP_REQUIRE(call) ::overspill::test::require_success(call, #call)

/// In which order the other trainer passes through layers, and who adds up micro-batches.
enum class Loop {
  layer_major_own_sums,  ///< as the native trainer: the kernels add up, one gradient a step
  layer_major,           ///< the engine adds up
  micro_batch_major,
};

/// The engine's configuration with what a run's has beside the loop.
inline std::string engine_configuration(const TrainConfig& c, Loop loop) {
  const auto tier = [](Placement p) {
    constexpr const char* kNames[] = {"auto", "device", "host", "nvme"};
    return kNames[static_cast<size_t>(p)];
  };
  constexpr const char* kOptimizers[] = {"adamw", "lion", "sgd", "adafactor"};
  constexpr const char* kStates[] = {"float32", "bfloat16", "int8"};
  const bool sums = loop != Loop::layer_major_own_sums;
  std::string text = fmt::format(
      "precision: {}\noptimizer: {}\noptimizer_state: {}\nweight_decay: {}\nmax_grad_norm: {}\n"
      "seed: {}\ngradient_accumulation_steps: {}\nzero_stage: {}\n",
      c.precision == Precision::bf16 ? "bf16" : "float32",
      kOptimizers[static_cast<size_t>(c.optimizer)],
      kStates[static_cast<size_t>(c.optimizer_state)], c.weight_decay, c.max_grad_norm, c.seed,
      sums ? c.gradient_accumulation_steps : 1, c.zero_stage);
  if (c.reduce_dtype) {
    text +=
        fmt::format("reduce_dtype: {}\n", *c.reduce_dtype == ReduceType::bf16 ? "bf16" : "float32");
  }
  const OffloadConfig& o = c.offload;
  text += fmt::format(
      "offload:\n  device: {}\n  weights: {}\n  optimizer: {}\n  gradients: {}\n  update: {}\n",
      device_name(o.device), tier(o.weights), tier(o.optimizer), tier(o.gradients),
      o.update == UpdateTiming::in_backward ? "in_backward" : "next_forward");
  if (o.device_memory) text += fmt::format("  device_memory: {}\n", *o.device_memory);
  if (o.host_memory) text += fmt::format("  host_memory: {}\n", *o.host_memory);
  if (o.chunk_parameters) text += fmt::format("  chunk_parameters: {}\n", *o.chunk_parameters);
  if (o.prefetch_depth) text += fmt::format("  prefetch_depth: {}\n", *o.prefetch_depth);
  if (o.nvme_paths.empty()) return text;
  text += "  nvme_paths:\n";
  for (const auto& path : o.nvme_paths) text += fmt::format("    - {}\n", path.string());
  return text;
}

class OtherTrainer {
 public:
  struct Step {
    double loss = 0, grad_norm = 0;
    bool skipped = false;
  };

  OtherTrainer(const TrainConfig& config, Loop loop,
               const osp_engine_options_t& given = OSP_ENGINE_OPTIONS_INIT)
      : config_(with_device(config)),
        loop_(loop),
        model_(trained_model(config)),
        batch_{config.micro_batch_size, config.sequence_len},
        rank_(given.rank),
        ranks_(given.world_size),
        layers_(make_layers()),
        data_(open_files(config), {config.sequence_len, config.shuffle, config.seed}) {
    make_memory();
    osp_engine_options_t options = given;
    const std::string gpu = "cuda:" + std::to_string(rank_);
    if (on_gpu()) options.device = gpu.c_str();
    if (loop != Loop::micro_batch_major) options.loop = OSP_LOOP_LAYER_MAJOR;
    const std::string text = engine_configuration(config_, loop);
    OSP_REQUIRE(osp_engine_create(text.c_str(), &options, &engine));
    try {
      register_layers();
      OSP_REQUIRE(osp_finalize(engine, &plan));
      OSP_REQUIRE(osp_initialize_weights(engine, config.seed, model_.config.initializer_range));
    } catch (...) {
      osp_engine_destroy(engine);
      throw;
    }
  }
  ~OtherTrainer() { osp_engine_destroy(engine); }
  OtherTrainer(const OtherTrainer&) = delete;
  OtherTrainer& operator=(const OtherTrainer&) = delete;

  Step train_step() {
    const uint32_t mbs = config_.gradient_accumulation_steps;
    fill_batch(mbs);
    osp_step_options_t step = OSP_STEP_OPTIONS_INIT;
    step.learning_rate = config_.learning_rate;
    const bool in_backward = config_.offload.update == UpdateTiming::in_backward;
    if (in_backward) OSP_REQUIRE(osp_step_begin(engine, &step));
    if (loop_ == Loop::micro_batch_major) {
      for (uint32_t mb = 0; mb < mbs; ++mb) pass(mb, mb + 1);
    } else {
      pass(0, mbs);
    }
    OSP_REQUIRE(osp_step(engine, in_backward ? nullptr : &step));
    osp_step_result_t result = OSP_STEP_RESULT_INIT;
    OSP_REQUIRE(osp_step_wait(engine, &result));
    cursor_ += uint64_t{mbs} * batch_.sequences * ranks_;
    device_->synchronize(DeviceStream::compute);
    double loss = 0;
    for (const double part : std::span(losses_, mbs)) loss += part;
    return {loss / static_cast<double>(batch_.tokens() * mbs), result.gradient_norm,
            result.skipped != 0};
  }

  /// Continues with the data behind so many steps.
  void skip_data(uint64_t steps) {
    cursor_ += steps * config_.gradient_accumulation_steps * batch_.sequences * ranks_;
  }
  std::string config_json() const { return model_.config.source.dump(); }
  const ModelShape& model() const { return model_; }

  osp_engine_t engine = nullptr;
  osp_plan_t plan = OSP_PLAN_INIT;

 private:
  static std::vector<std::unique_ptr<TokenFile>> open_files(const TrainConfig& config) {
    std::vector<std::unique_ptr<TokenFile>> files;
    for (const DatasetConfig& dataset : config.datasets) {
      files.push_back(open_token_file({.path = dataset.path,
                                       .format = dataset.type,
                                       .vocab_size = trained_model(config).config.vocab_size,
                                       .byte_tokenizer = false}));
    }
    return files;
  }

  static TrainConfig with_device(TrainConfig config) {
    if (config.offload.device == DeviceMode::automatic) config.offload.device = discrete_device();
    return config;
  }
  bool on_gpu() const { return config_.offload.device == DeviceMode::cuda; }
  DType type() const { return config_.precision == Precision::bf16 ? DType::bf16 : DType::f32; }
  std::unique_ptr<Model> make_layers() const {
    if (on_gpu()) return make_cuda_model(model_, type(), batch_, rank_);
    return std::make_unique<Llama>(model_, type(), batch_, host_kernels());
  }

  /// All that it computes with, on its own device, and what passes between that and the host.
  void make_memory() {
    const uint64_t mbs = config_.gradient_accumulation_steps, tokens = mbs * batch_.tokens();
    const uint64_t activation = round_up(
        batch_.tokens() * model_.config.hidden_size * dtype_bytes(layers_->activation_type()), 256);
    uint64_t most = 0;
    for (const LayerShape& layer : model_.layers) most = std::max(most, layer.padded);
    const uint64_t sums = round_up(most * sizeof(float), 256);
    const uint64_t activations = (model_.layers.size() + 1) * mbs * activation;
    const uint64_t bytes = layers_->scratch_bytes() + activations + 2 * sums;
    if (on_gpu()) {
      device_ = make_cuda_device(bytes, rank_);
    } else {
      device_ = make_host_device(bytes, true);
    }
    std::byte* at = device_->memory();
    layers_->attach(*device_, at);
    at += layers_->scratch_bytes();
    for (size_t layer = 0; layer <= model_.layers.size(); ++layer) {
      auto& of_layer = activations_.emplace_back();
      for (uint64_t mb = 0; mb < mbs; ++mb, at += activation) of_layer.push_back(at);
    }
    sums_ = reinterpret_cast<float*>(at);
    embedding_sums_ = reinterpret_cast<float*>(at + sums);
    host_.emplace(round_up(mbs * sizeof(double) + 2 * tokens * sizeof(int32_t), 4096), "batch");
    pinned_ = device_->register_host({host_->memory(), host_->bytes()});
    losses_ = reinterpret_cast<double*>(host_->memory());
    tokens_ = std::span(reinterpret_cast<int32_t*>(losses_ + mbs), tokens);
    targets_ = std::span(tokens_.data() + tokens, tokens);
    if (on_gpu()) {
      stream_ = dynamic_cast<CudaDevice&>(*device_).native_stream(DeviceStream::compute);
    }
  }

  bool tied() const { return model_.config.tie_word_embeddings; }

  void register_layers() {
    for (size_t l = 0; l < model_.layers.size(); ++l) {
      std::vector<osp_tensor_t> tensors;
      for (const LayerTensor& tensor : model_.layers[l].tensors) {
        osp_tensor_t given = OSP_TENSOR_INIT;
        given.name = tensor.name.c_str();
        given.shape = tensor.shape.data();
        given.rank = static_cast<uint32_t>(tensor.shape.size());
        given.frozen = tensor.trainable ? 0 : 1;
        tensors.push_back(given);
      }
      if (l == model_.head() && tied()) {
        const LayerTensor& embedding = model_.layers[0].tensors[0];
        osp_tensor_t given = OSP_TENSOR_INIT;
        given.name = "lm_head.weight";
        given.shape = embedding.shape.data();
        given.rank = 2;
        given.tied_to = embedding.name.c_str();
        tensors.push_back(given);
      }
      const std::string name = "layer " + std::to_string(l);
      OSP_REQUIRE(
          osp_layer_register(engine, name.c_str(), tensors.data(), tensors.size(), nullptr));
    }
  }

  void fill_batch(uint32_t micro_batches) {
    const uint64_t length = batch_.sequence_len;
    const uint64_t first = cursor_ + uint64_t{rank_} * micro_batches * batch_.sequences;
    for (uint64_t i = 0; i < micro_batches * batch_.sequences; ++i) {
      data_.get(first + i, tokens_.subspan(i * length, length),
                targets_.subspan(i * length, length));
    }
  }

  std::vector<const void*> acquire(uint32_t layer) {
    const size_t count =
        model_.layers[layer].tensors.size() + (layer == model_.head() && tied() ? 1 : 0);
    std::vector<const void*> weights(count);
    OSP_REQUIRE(osp_acquire(engine, layer, stream_, weights.data(), count));
    return weights;
  }
  void release(uint32_t layer) { OSP_REQUIRE(osp_release(engine, layer, stream_)); }

  /// Micro-batches [first, last) through all layers and back.
  void pass(uint32_t first, uint32_t last) {
    for (uint32_t l = 0; l < model_.head(); ++l) {
      const auto weights = acquire(l);
      for (uint32_t mb = first; mb < last; ++mb) {
        void* const y = activations_[l + 1][mb];
        if (l == 0) {
          layers_->embed(weights[0], tokens_.data() + mb * batch_.tokens(), y);
        } else {
          layers_->block(l, weights[0], nullptr, activations_[l][mb], y);
        }
      }
      release(l);
    }
    const uint32_t head = model_.head();
    backward(head, first, last);
    for (uint32_t l = head; l-- > model_.lowest_trainable();) backward(l, first, last);
  }

  void backward(uint32_t l, uint32_t first, uint32_t last) {
    std::vector<const void*> weights;
    if (l > 0) weights = acquire(l);
    const bool own = loop_ == Loop::layer_major_own_sums;
    for (uint32_t mb = first; mb < last; ++mb) {
      compute_backward(l, mb, weights, !own || mb == first);
      if (!own) submit(l);
    }
    if (l > 0) release(l);
    if (own) submit(l);
  }

  void compute_backward(uint32_t l, uint32_t mb, const std::vector<const void*>& weights,
                        bool fresh) {
    float* const sums = model_.layers[l].trainable() ? sums_ : nullptr;
    void* const dy = activations_[model_.head() + 1][mb];
    const int32_t* tokens = tokens_.data() + mb * batch_.tokens();
    if (l == model_.head()) {
      const bool train_tied = tied() && model_.layers[0].trainable();
      const uint64_t all = batch_.tokens() * config_.gradient_accumulation_steps * ranks_;
      layers_->loss(Model::Head{.weights = weights[0],
                                .embedding = tied() ? weights.back() : nullptr,
                                .sums = sums,
                                .embedding_sums = train_tied ? embedding_sums_ : nullptr,
                                .first = fresh},
                    activations_[l][mb], targets_.data() + mb * batch_.tokens(),
                    1.0f / static_cast<float>(all), dy, &losses_[mb]);
    } else if (l > 0) {
      layers_->block_backward(l, weights[0], nullptr, activations_[l][mb], dy, sums, fresh);
    } else if (tied() && loop_ == Loop::layer_major_own_sums) {
      // Goes on with what the head has left.
      layers_->embed_backward(tokens, dy, embedding_sums_, false);
    } else {
      layers_->embed_backward(tokens, dy, sums, fresh);
    }
  }

  void submit(uint32_t l) {
    const bool own = loop_ == Loop::layer_major_own_sums;
    const LayerShape& shape = model_.layers[l];
    const bool train_tied = tied() && model_.layers[0].trainable();
    if (l == model_.head() && train_tied && !own) {
      OSP_REQUIRE(osp_submit_gradient(engine, l, static_cast<uint32_t>(shape.tensors.size()),
                                      embedding_sums_, OSP_FLOAT32,
                                      model_.layers[0].tensors[0].elements, stream_));
    }
    if (!shape.trainable()) return;
    const float* sums = l == 0 && tied() && own ? embedding_sums_ : sums_;
    OSP_REQUIRE(osp_submit_gradients(engine, l, sums, OSP_FLOAT32, shape.padded, stream_));
    if (l == 0 && tied() && own) OSP_REQUIRE(osp_gradients_done(engine, 0));
  }

  TrainConfig config_;
  Loop loop_;
  ModelShape model_;
  BatchShape batch_;
  const uint32_t rank_, ranks_;
  const std::unique_ptr<Model> layers_;
  SequenceData data_;
  uint64_t cursor_ = 0;

  std::unique_ptr<Device> device_;
  std::optional<Arena> host_;
  HostRegistration pinned_;
  void* stream_ = nullptr;
  std::span<int32_t> tokens_, targets_;
  double* losses_ = nullptr;                          ///< by micro-batch
  std::vector<std::vector<std::byte*>> activations_;  ///< by layer and micro-batch
  float *sums_ = nullptr, *embedding_sums_ = nullptr;
};

}  // namespace overspill::test
