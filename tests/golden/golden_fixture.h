// What tests against golden numbers share: a checkpoint run straight through Llama, a training run
// in this process with all its state on NVMe and its curve, and their comparison.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <vector>

#include "engine/base/units.h"
#include "engine/model/llama.h"
#include "engine/model/safetensors.h"
#include "engine/train/trainer.h"
#include "optim/split_master.h"
#include "tests/contract/devices.h"
#include "tests/contract/run_ranks.h"

namespace overspill::test {

namespace fs = std::filesystem;
using Json = nlohmann::json;

inline Json read_json(const fs::path& path) {
  std::ifstream stream(path);
  return Json::parse(stream);
}

/// A Hugging Face directory's model with all its weights in memory.
class LoadedModel {
 public:
  LoadedModel(const fs::path& directory, DType type, const BatchShape& batch)
      : model_(llama_layers(load_model_config(directory))),
        type_(type),
        batch_(batch),
        llama_(model_, type, batch, host_kernels()),
        scratch_(std::aligned_alloc(4096, llama_.scratch_bytes())) {
    llama_.set_scratch(static_cast<std::byte*>(scratch_.get()));
    const ModelTensors tensors(directory);
    for (const LayerShape& layer : model_.layers) {
      std::vector<float> flat(layer.padded);
      for (const LayerTensor& t : layer.tensors) {
        tensors.read_floats(t.name, 0, std::span(flat).subspan(t.offset, t.elements));
      }
      std::vector<uint16_t> narrow;
      for (const float value : flat) narrow.push_back(split_master(value).weight);
      floats_.push_back(std::move(flat));
      halves_.push_back(std::move(narrow));
    }
  }

  const std::vector<std::vector<float>>& float_weights() const { return floats_; }

  /// [tokens, vocabulary] of one micro-batch. `begins`: of documents, as Model::block takes them,
  /// or none.
  std::vector<float> logits(const std::vector<int32_t>& tokens,
                            const std::vector<int32_t>& begins = {}) const {
    std::vector<float> result(batch_.tokens() * model_.config.vocab_size);
    llama_.logits(head(), hidden(tokens, begins).data(), result.data());
    return result;
  }
  /// Of each token, from the engine's loss kernel.
  std::vector<float> losses(const std::vector<int32_t>& tokens, const std::vector<int32_t>& targets,
                            const std::vector<int32_t>& begins = {}) const {
    std::vector<float> all = logits(tokens, begins), result(targets.size());
    host_kernels().cross_entropy(all.data(), targets.data(), 0, result.data(), targets.size(),
                                 model_.config.vocab_size);
    return result;
  }
  /// Summed over the micro-batch, as training computes it.
  double loss(const std::vector<int32_t>& tokens, const std::vector<int32_t>& targets) const {
    return llama_.loss(head(), hidden(tokens, {}).data(), targets.data(), 1.0f, nullptr);
  }

 private:
  const void* weights(size_t layer) const {
    return type_ == DType::f32 ? static_cast<const void*>(floats_[layer].data())
                               : halves_[layer].data();
  }
  Llama::Head head() const {
    return {.weights = weights(model_.head()),
            .embedding = model_.config.tie_word_embeddings ? weights(0) : nullptr,
            .sums = nullptr,
            .embedding_sums = nullptr,
            .first = false};
  }
  std::vector<float> hidden(const std::vector<int32_t>& tokens,
                            const std::vector<int32_t>& begins) const {
    const int32_t* const documents = begins.empty() ? nullptr : begins.data();
    EXPECT_EQ(tokens.size(), batch_.tokens());
    std::vector<float> x(batch_.tokens() * model_.config.hidden_size), y(x.size());
    llama_.embed(weights(0), tokens.data(), x.data());
    for (uint32_t layer = 1; layer < model_.head(); ++layer) {
      llama_.block(layer, weights(layer), documents, x.data(), y.data());
      std::swap(x, y);
    }
    return x;
  }

  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  ModelShape model_;
  DType type_;
  BatchShape batch_;
  Llama llama_;
  std::unique_ptr<void, Free> scratch_;
  std::vector<std::vector<float>> floats_;
  std::vector<std::vector<uint16_t>> halves_;
};

struct CurvePoint {
  double loss, grad_norm;
};
using Curve = std::vector<CurvePoint>;

inline Curve curve_of(const Json& points) {
  Curve curve;
  for (const Json& point : points) curve.push_back({point.at("loss"), point.at("grad_norm")});
  return curve;
}

/// Largest relative deviations over all steps.
inline CurvePoint deviation(const Curve& got, const Curve& want) {
  CurvePoint worst{0, 0};
  EXPECT_EQ(got.size(), want.size());
  for (size_t i = 0; i < std::min(got.size(), want.size()); ++i) {
    worst.loss = std::max(worst.loss, std::abs(got[i].loss / want[i].loss - 1));
    worst.grad_norm = std::max(worst.grad_norm, std::abs(got[i].grad_norm / want[i].grad_norm - 1));
  }
  return worst;
}

inline void expect_curve(const Curve& got, const Curve& want, const CurvePoint& tolerance) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_NEAR(got[i].loss, want[i].loss, tolerance.loss * want[i].loss) << "step " << i + 1;
    EXPECT_NEAR(got[i].grad_norm, want[i].grad_norm, tolerance.grad_norm * want[i].grad_norm)
        << "step " << i + 1;
  }
  const CurvePoint worst = deviation(got, want);
  testing::Test::RecordProperty("worst_loss_deviation", fmt::format("{:.1e}", worst.loss));
  testing::Test::RecordProperty("worst_norm_deviation", fmt::format("{:.1e}", worst.grad_norm));
}

/// A directory that is removed at the end of its test.
class GoldenTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "overspill_golden_XXXXXX").string();
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    directory_ = name;
    fs::create_directories(directory_ / "nvme");
  }
  void TearDown() override { fs::remove_all(directory_); }

  /// Discrete device, every kind of state on NVMe, small chunks and one layer of prefetch.
  TrainConfig paged_config(const fs::path& model, const fs::path& tokens,
                           Precision precision) const {
    TrainConfig config;
    config.base_model = model;
    config.datasets = {{.path = tokens}};
    config.precision = precision;
    config.lr_scheduler = LrScheduler::constant;
    config.shuffle = false;
    config.logging_steps = 1000;
    config.output_dir = directory_ / "out";
    config.offload.device_memory = 64 * kMiB;
    config.offload.host_memory = 64 * kMiB;
    config.offload.nvme_paths = {directory_ / "nvme"};
    config.offload.weights = config.offload.optimizer = Placement::nvme;
    config.offload.gradients = config.offload.activations = Placement::nvme;
    config.offload.prefetch_depth = 1;
    config.offload.chunk_parameters = 16384;
    config.offload.device = discrete_device();
    return config;
  }

  /// Trains from the start and returns the curve; the run's files stay in config.output_dir.
  static Curve train(const TrainConfig& config, RunReport* report = nullptr) {
    fs::remove_all(config.output_dir);
    {
      Trainer trainer(config);
      const std::atomic<bool> stop{false};
      const RunReport made = trainer.run(stop);
      if (report != nullptr) *report = made;
    }
    return trained_curve(config);
  }
  /// The same by two ranks, which share the accumulation.
  static Curve train_by_two(TrainConfig config, uint32_t zero_stage) {
    EXPECT_EQ(config.gradient_accumulation_steps, 2u);
    config.gradient_accumulation_steps = 1;
    config.zero_stage = zero_stage;
    fs::remove_all(config.output_dir);
    run_ranks(config, 2);
    return trained_curve(config);
  }
  static Curve trained_curve(const TrainConfig& config) {
    Curve curve;
    std::ifstream stream(config.output_dir / "metrics.jsonl");
    for (std::string line; std::getline(stream, line);) {
      const Json object = Json::parse(line);
      if (!object.contains("grad_norm")) continue;
      curve.push_back({object.at("loss"), object.at("grad_norm")});
    }
    return curve;
  }

  fs::path directory_;
};

}  // namespace overspill::test
