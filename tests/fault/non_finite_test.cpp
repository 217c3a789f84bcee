// Losses and gradients that are not finite: the update is skipped, said so, and a run of them stops
// training; weights are as if the step had not been.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "engine/model/safetensors.h"
#include "engine/plan/planner.h"
#include "tests/contract/devices.h"
#include "tests/fault/training_fixture.h"

namespace overspill {
namespace {

using namespace test;

using Weights = std::map<std::string, std::vector<float>>;

class NonFinite : public TrainingTest {
 protected:
  static ModelShape shape() {
    return llama_layers(parse_model_config(shape_json(false), "config.json"));
  }
  /// Small regular weights; norms are ones.
  static Weights regular_weights() {
    Weights weights;
    uint64_t key = 0;
    for (const LayerShape& layer : shape().layers) {
      for (const LayerTensor& tensor : layer.tensors) {
        std::vector<float>& values = weights[tensor.name];
        values.assign(tensor.elements, 1.0f);
        ++key;
        for (size_t i = 0; tensor.decay && i < values.size(); ++i) {
          values[i] = 0.05f * random_normal(key, i);
        }
      }
    }
    return weights;
  }
  /// A run from these weights, written as a model directory of float32.
  TrainConfig config_of(const Weights& weights) {
    const fs::path directory = root_ / "model";
    fs::create_directories(directory);
    put_file(directory / "config.json", shape_json(false).dump());
    std::vector<TensorSpec> specs;
    for (const LayerShape& layer : shape().layers) {
      for (const LayerTensor& tensor : layer.tensors) {
        specs.push_back({tensor.name, tensor.shape, "F32"});
      }
    }
    SafetensorsWriter writer(directory / "model.safetensors", specs, {{"format", "pt"}});
    for (size_t i = 0; i < specs.size(); ++i) {
      writer.write(i, 0, std::as_bytes(std::span(weights.at(specs[i].name))));
    }
    writer.finish();
    TrainConfig config = tiny_config();
    config.init_from_scratch = false;
    config.base_model = directory;
    config.base_model_config.clear();
    config.precision = Precision::float32;
    config.shuffle = false;
    return config;
  }
  /// Tokens of 4 sequences a step; only step 2's contain the token 299.
  fs::path tokens_with_a_bad_one() const {
    std::string bytes = token_bytes(32 * 8 + 1, 3);
    for (size_t i = 0; i < bytes.size(); i += 2) {
      if (bytes[i + 1] == 1 && static_cast<uint8_t>(bytes[i]) == 299 - 256) bytes[i + 1] = 0;
    }
    bytes[2 * (32 * 3 + 5)] = static_cast<char>(299 - 256);
    bytes[2 * (32 * 3 + 5) + 1] = 1;
    put_file(root_ / "bad.bin", bytes);
    return root_ / "bad.bin";
  }
  static std::string base_name(size_t block, const std::string& rest) {
    return "model.layers." + std::to_string(block) + "." + rest;
  }
  /// Finite activations and loss, but the gradient of block 0's v_proj overflows.
  static Weights overflowing_gradient_in_block_0() {
    Weights weights = regular_weights();
    for (const char* name :
         {"self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"}) {
      std::ranges::fill(weights.at(base_name(0, name)), 0.0f);
    }
    std::ranges::fill(weights.at(base_name(0, "input_layernorm.weight")), 2e37f);
    for (float& w : weights.at(base_name(0, "self_attn.o_proj.weight"))) w *= 1e20f;
    return weights;
  }
};

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

TEST_F(NonFinite, LossesInARowStopTheRun) {
  Weights weights = regular_weights();
  weights.at("model.norm.weight")[7] = kNaN;
  for (const bool in_backward : {false, true}) {
    TrainConfig config = config_of(weights);
    config.max_steps = 10;
    if (in_backward) update_in_backward(config);
    fs::remove_all(config.output_dir);
    const Error error = refusal(config);
    EXPECT_EQ(error.code(), ErrorCode::non_finite) << error.what();
    EXPECT_TRUE(has(error.what(), "step 3: non-finite loss, 3 steps in a row"));
    EXPECT_TRUE(has(error.what(), "max_non_finite_steps: 3"));
    EXPECT_TRUE(has(error.what(), "lower learning_rate"));
    const std::vector<Json> lines = metrics_of(config.output_dir);
    ASSERT_EQ(lines.size(), 2u);
    for (const Json& line : lines) {
      EXPECT_EQ(line.at("update_skipped"), true);
      EXPECT_TRUE(line.at("loss").is_null()) << "JSON has no NaN";
    }
    EXPECT_FALSE(fs::exists(config.output_dir / "checkpoint-10"));
  }
}

TEST_F(NonFinite, TheCommandSaysSoAndEndsWith1) {
  Weights weights = regular_weights();
  weights.at(base_name(1, "mlp.up_proj.weight"))[40] = std::numeric_limits<float>::infinity();
  config_of(weights);
  write_yaml();
  const Child::Result result =
      start({"init_from_scratch=false", "base_model=" + (root_ / "model").string(),
             "base_model_config=null", "max_non_finite_steps=2"})
          .wait();
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_TRUE(has(result.err, "step 1: non-finite loss: update skipped (1 in a row)"));
  EXPECT_TRUE(has(result.err, "overspill: non_finite: step 2: non-finite loss, 2 steps in a row"));
}

TEST_F(NonFinite, ASkippedUpdateLeavesEveryWeight) {
  Weights weights = regular_weights();
  weights.at("model.norm.weight")[7] = kNaN;
  for (const Precision precision : {Precision::bf16, Precision::float32}) {
    for (const bool in_backward : {false, true}) {
      TrainConfig config = config_of(weights);
      config.precision = precision;
      config.max_steps = 2;
      config.save_only_model = false;
      if (in_backward) update_in_backward(config);
      const FinishedRun run = run_fresh(config);
      EXPECT_EQ(run.report.skipped_updates, 2u);
      EXPECT_EQ(run.final().at("skipped_updates").get<uint64_t>(), 2u);
      put_file(root_ / "model.safetensors", run.checkpoint.at("model.safetensors"));
      const SafetensorsFile file(root_ / "model.safetensors");
      for (const auto& [name, values] : weights) {
        std::vector<float> saved(values.size());
        file.read_floats(*file.find(name), 0, saved);
        for (size_t i = 0; i < values.size(); ++i) {
          const float tolerance = precision == Precision::bf16 ? std::abs(values[i]) / 256 : 0;
          if (std::isnan(values[i])) continue;
          ASSERT_NEAR(saved[i], values[i], tolerance) << name << i;
        }
      }
    }
  }
}

/// One bad batch between good ones: counted, passed over, and the same bits however it is placed.
TEST_F(NonFinite, TrainingGoesOnAfterABadBatch) {
  Weights weights = regular_weights();
  weights.at("model.embed_tokens.weight")[299 * 64] = kNaN;
  TrainConfig config = config_of(weights);
  config.datasets[0].path = tokens_with_a_bad_one();
  config.max_steps = 4;
  config.max_non_finite_steps = 1;
  EXPECT_EQ(refusal(config).code(), ErrorCode::non_finite);
  fs::remove_all(config.output_dir);
  config.max_non_finite_steps = 2;
  config.max_grad_norm = 0;
  for (const OptimizerKind kind : {OptimizerKind::adamw, OptimizerKind::adafactor}) {
    config.optimizer = kind;
    const FinishedRun reference = run_fresh(config);
    std::string skipped;
    for (const Json& line : reference.steps()) skipped += line.at("update_skipped") ? "x" : ".";
    EXPECT_EQ(skipped, ".x..");
    TrainConfig other = config;
    other.offload.device = discrete_device();
    other.offload.prefetch_depth = 3;
    expect_same_results(reference, run_fresh(other));
    // The bad loss comes between the two updates, which are of the good step before it.
    other.offload.update_twice = true;
    expect_same_results(reference, run_fresh(other));
    other.offload.update_twice = false;
    update_in_backward(other);
    expect_same_results(reference, run_fresh(other));
    other = config;
    place_all(other, Placement::device);
    update_in_backward(other);
    expect_same_results(reference, run_fresh(other));
  }
}

TEST_F(NonFinite, AGradientAloneSkipsTheUpdate) {
  TrainConfig config = config_of(overflowing_gradient_in_block_0());
  for (const Precision precision : {Precision::bf16, Precision::float32}) {
    config.precision = precision;
    config.max_steps = 1;
    const FinishedRun run = run_fresh(config);
    EXPECT_EQ(run.report.skipped_updates, 1u);
    EXPECT_TRUE(std::isfinite(run.report.last_loss));
    EXPECT_TRUE(run.steps()[0].at("grad_norm").is_null());
  }
}

TEST_F(NonFinite, AGradientBelowUpdatedLayersStopsUpdatesInTheBackward) {
  TrainConfig config = config_of(overflowing_gradient_in_block_0());
  update_in_backward(config);
  for (const DeviceMode device : devices_under_test()) {
    config.offload.device = device;
    fs::remove_all(config.output_dir);
    const Error error = refusal(config);
    EXPECT_EQ(error.code(), ErrorCode::non_finite) << error.what();
    EXPECT_TRUE(has(error.what(),
                    "step 1: non-finite gradient after layers above it were already "
                    "updated"));
    EXPECT_TRUE(has(error.what(), "update: next_forward"));
    EXPECT_FALSE(fs::exists(config.output_dir / "latest"));
  }
}

/// The highest layer that trains is the first to be updated: nothing is undone when it is skipped.
TEST_F(NonFinite, AGradientBelowFrozenLayersSkipsTheUpdateInTheBackward) {
  const Weights weights = overflowing_gradient_in_block_0();
  TrainConfig config = config_of(weights);
  config.unfrozen_parameters = {{"model.embed_tokens", "model.layers.0."}};
  config.max_steps = 1;
  update_in_backward(config);
  const FinishedRun run = run_fresh(config);
  EXPECT_EQ(run.report.skipped_updates, 1u);
  EXPECT_EQ(run.steps()[0].at("update_skipped"), true);
  EXPECT_EQ(run.checkpoint.at("model.safetensors"),
            bytes_of_file(config.base_model / "model.safetensors"));
}

/// A layer's update starts only when its gradients are known to be finite.
TEST_F(NonFinite, UpdatesInTheBackwardFollowTheirLayersReduction) {
  size_t updates = 0;
  for (const Precision precision : {Precision::bf16, Precision::float32}) {
    for (const DeviceMode device : devices_under_test()) {
      for (const Placement tier : {Placement::device, Placement::host, Placement::nvme}) {
        TrainConfig config = tiny_config();
        place_all(config, tier);
        update_in_backward(config);
        config.precision = precision;
        config.offload.device = device;
        const Layout layout = RunSetup(config).layout;
        const Program program = plan_step(layout, {true, true, false, false, 2});
        const HappensBefore order(program);
        std::map<uint32_t, OpId> reductions;
        for (uint32_t i = 0; i < program.ops.size(); ++i) {
          const Op& op = program.ops[i];
          if (op.kind == OpKind::reduce_gradient) reductions[op.layer] = OpId{i};
          if (op.kind != OpKind::update) continue;
          ++updates;
          ASSERT_TRUE(reductions.contains(op.layer));
          EXPECT_TRUE(order.ordered(reductions[op.layer], OpId{i})) << "layer " << op.layer;
        }
      }
    }
  }
  EXPECT_GT(updates, 70u);
}

}  // namespace
}  // namespace overspill
