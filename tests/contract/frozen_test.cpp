// Partly frozen models with groups of learning rates: results do not depend on placement, frozen
// tensors leave a run as they came, and a resume must freeze the same.
#include <gtest/gtest.h>

#include "engine/model/safetensors.h"
#include "tests/contract/devices.h"
#include "tests/fault/training_fixture.h"

namespace overspill {
namespace {

using namespace test;

using Change = std::function<void(TrainConfig&)>;
using Patterns = std::vector<std::string>;

/// The embedding, half of a block, a block between frozen ones, and a norm.
const Patterns kScattered = {"model.embed_tokens", "model.layers.0.self_attn", "model.layers.2.mlp",
                             "model.layers.2.input", "model.norm"};
/// The backward ends in the middle of the model, below a block that is all frozen.
const Patterns kUpper = {"model.layers.1.mlp.(up|down)_proj", "model.layers.1.input_layernorm"};

class FrozenContract : public TrainingTest {
 protected:
  TrainConfig frozen_config(const Patterns& unfrozen, bool tied = false) const {
    TrainConfig config = tiny_config(tied);
    config.unfrozen_parameters = unfrozen;
    config.lr_groups = {{"mlp", {"mlp"}, 3e-3}};
    config.offload.chunk_parameters = 8192;  // blocks have wholly frozen chunks beside others
    return config;
  }
  void expect_invariant(const TrainConfig& config, const std::vector<Change>& changes) {
    const FinishedRun reference = run_fresh(config);
    EXPECT_EQ(reference.steps().size(), 3u);
    EXPECT_GT(reference.steps()[2].at("grad_norm").get<double>(), 0);
    for (size_t i = 0; i < changes.size(); ++i) {
      SCOPED_TRACE(fmt::format("change {}", i));
      TrainConfig changed = config;
      changes[i](changed);
      expect_same_results(reference, run_fresh(changed));
    }
  }
  static std::vector<float> tensor(const fs::path& directory, const LayerTensor& tensor) {
    std::vector<float> values(tensor.elements);
    ModelTensors(directory).read_floats(tensor.name, 0, values);
    return values;
  }
};

const std::vector<Change> kPlacements = {
    [](TrainConfig& c) { c.offload.weights = Placement::device; },
    [](TrainConfig& c) { c.offload.weights = Placement::host; },
    [](TrainConfig& c) { c.offload.optimizer = Placement::device; },
    [](TrainConfig& c) { c.offload.optimizer = Placement::host; },
    [](TrainConfig& c) { c.offload.activations = Placement::host; },
    [](TrainConfig& c) { c.offload.prefetch_depth = 0; },
    [](TrainConfig& c) { c.offload.prefetch_depth = 3; },
    [](TrainConfig& c) { c.offload.chunk_parameters = 4096; },
    [](TrainConfig& c) { c.offload.chunk_parameters = 1 << 20; },
    [](TrainConfig& c) {
      c.offload.weights = c.offload.activations = Placement::device;
      c.offload.optimizer = Placement::host;
    }};

class FrozenPlacement : public FrozenContract,
                        public testing::WithParamInterface<std::tuple<Precision, DeviceMode>> {
 protected:
  TrainConfig mode_config(const Patterns& unfrozen, bool tied) const {
    TrainConfig config = frozen_config(unfrozen, tied);
    config.precision = std::get<0>(GetParam());
    config.offload.device = std::get<1>(GetParam());
    return config;
  }
};

INSTANTIATE_TEST_SUITE_P(
    Modes, FrozenPlacement,
    testing::Combine(testing::Values(Precision::bf16, Precision::float32),
                     testing::Values(DeviceMode::unified, DeviceMode::discrete)),
    [](const testing::TestParamInfo<std::tuple<Precision, DeviceMode>>& param) {
      const bool unified = std::get<1>(param.param) == DeviceMode::unified;
      return std::string(precision_name(std::get<0>(param.param))) +
             (unified ? "_unified" : "_discrete");
    });

TEST_P(FrozenPlacement, NextForward) {
  std::vector<Change> changes = kPlacements;
  for (const Placement tier : {Placement::device, Placement::host}) {
    changes.push_back([=](TrainConfig& c) { c.offload.gradients = tier; });
    changes.push_back([=](TrainConfig& c) { place_all(c, tier); });
  }
  for (const bool tied : {false, true}) expect_invariant(mode_config(kScattered, tied), changes);
  expect_invariant(mode_config(kUpper, false), changes);
}

TEST_P(FrozenPlacement, UpdatedTwice) {
  std::vector<Change> changes;
  for (const Change& change : kPlacements) {
    changes.push_back([=](TrainConfig& c) {
      c.offload.update_twice = true;
      change(c);
    });
  }
  for (const bool tied : {false, true}) expect_invariant(mode_config(kScattered, tied), changes);
  expect_invariant(mode_config(kUpper, false), changes);
}

TEST_P(FrozenPlacement, TiedEmbeddingFrozen) {
  expect_invariant(mode_config(kUpper, true), {kPlacements[0], kPlacements[5], kPlacements[9]});
}

/// Also with and without a pending update: both timings give the same bits.
TEST_P(FrozenPlacement, InBackward) {
  for (const bool tied : {false, true}) {
    TrainConfig config = mode_config(tied ? kScattered : kUpper, tied);
    config.max_grad_norm = 0;
    std::vector<Change> changes;
    for (const Change& change : kPlacements) {
      changes.push_back([=](TrainConfig& c) {
        change(c);
        update_in_backward(c);
      });
    }
    expect_invariant(config, changes);
  }
}

TEST_F(FrozenContract, UnifiedEqualsDiscreteForEveryOptimizer) {
  for (const OptimizerKind kind :
       {OptimizerKind::adamw, OptimizerKind::lion, OptimizerKind::sgd, OptimizerKind::adafactor}) {
    for (const StateFormat state : {StateFormat::float32, StateFormat::int8}) {
      if (kind == OptimizerKind::adafactor && state != StateFormat::float32) continue;
      TrainConfig config = frozen_config(kScattered, true);
      config.optimizer = kind;
      config.optimizer_state = state;
      config.learning_rate = 1e-3;
      expect_invariant(config, {[](TrainConfig& c) { c.offload.device = discrete_device(); },
                                [](TrainConfig& c) { c.offload.chunk_parameters = 4096; }});
    }
  }
}

TEST_F(FrozenContract, OnlyWhatTrainsChanges) {
  for (const Precision precision : {Precision::bf16, Precision::float32}) {
    TrainConfig first = tiny_config();
    first.precision = precision;
    first.max_steps = 1;
    first.output_dir = root_ / fmt::format("source-{}", precision_name(precision));
    const fs::path source = run(first).report.checkpoint;
    TrainConfig config = frozen_config(kScattered);
    config.precision = precision;
    config.init_from_scratch = false;
    config.base_model = source;
    config.base_model_config.clear();
    config.output_dir = root_ / fmt::format("tuned-{}", precision_name(precision));
    const fs::path tuned = run(config).report.checkpoint;
    size_t frozen = 0, trained = 0;
    for (const LayerShape& layer : RunSetup(config).model.layers) {
      for (const LayerTensor& t : layer.tensors) {
        EXPECT_EQ(tensor(source, t) == tensor(tuned, t), !t.trainable) << t.name;
        (t.trainable ? trained : frozen) += 1;
      }
    }
    EXPECT_EQ(trained, 10u);
    EXPECT_EQ(frozen, 20u);
    const SafetensorsFile state(tuned / "optimizer.safetensors");
    EXPECT_NE(state.find("model.norm.weight.exp_avg"), nullptr);
    EXPECT_EQ(state.find("lm_head.weight.exp_avg"), nullptr);
    EXPECT_EQ(state.find("lm_head.weight.remainder"), nullptr);
  }
}

TEST_F(FrozenContract, ResumesToTheSameBits) {
  TrainConfig config = frozen_config(kScattered);
  config.lr_scheduler = LrScheduler::cosine;
  const FinishedRun whole = run_fresh(config);
  config.save_steps = 1;
  const FinishedRun saving = run(config);
  for (const int step : {1, 2}) {
    TrainConfig resumed = config;
    resumed.save_steps = 0;
    resumed.resume_from_checkpoint = config.output_dir / fmt::format("checkpoint-{}", step);
    resumed.offload.weights = Placement::host;
    resumed.offload.device = discrete_device();
    const FinishedRun rest = run_fresh(resumed);
    EXPECT_EQ(rest.report.steps, static_cast<uint64_t>(3 - step));
    expect_same_files(whole.checkpoint, rest.checkpoint);
  }
}

TEST_F(FrozenContract, ResumingWithOtherUnfrozenParametersIsRefused) {
  TrainConfig config = frozen_config(kScattered);
  config.max_steps = 1;
  const fs::path checkpoint = run(config).report.checkpoint;
  config.max_steps = 2;
  config.output_dir = root_ / "other";
  config.resume_from_checkpoint = checkpoint;
  for (const std::optional<Patterns>& other :
       {std::optional<Patterns>(), std::optional(kUpper),
        std::optional(Patterns{"model.layers.2.mlp", "model.norm"})}) {
    config.unfrozen_parameters = other;
    const Error error = refusal(config);
    EXPECT_EQ(error.code(), ErrorCode::invalid_file);
    EXPECT_TRUE(has(error.what(), "optimizer.safetensors: model."));
    EXPECT_TRUE(has(error.what(), "unfrozen_parameters that wrote the checkpoint"));
  }
}

TEST_F(FrozenContract, GroupsHaveTheirOwnRateAndTheMetricsTheBases) {
  TrainConfig config = tiny_config();
  const FinishedRun plain = run_fresh(config);
  config.lr_groups = {{"all mlp", {"mlp"}, config.learning_rate}, {"head", {"lm_head"}, 1e-2}};
  expect_same_results(plain, run_fresh(config));
  config.lr_groups[0].learning_rate = 1e-4;
  const FinishedRun slower = run_fresh(config);
  EXPECT_NE(step_text(plain.lines), step_text(slower.lines));
  for (const Json& step : slower.steps()) {
    EXPECT_EQ(step.at("learning_rate").get<double>(), config.learning_rate);
  }
}

}  // namespace
}  // namespace overspill
