// The native trainer rebuilt on the public header: the same losses, norms, weights and optimizer
// state, bit for bit, wherever state lives.
#include <gtest/gtest.h>

#include "tests/contract/c_api_trainer.h"
#include "tests/fault/training_fixture.h"

namespace overspill {
namespace {

using namespace test;

struct ApiRun {
  std::vector<OtherTrainer::Step> steps;
  Files checkpoint;
};

class CApiTrainer : public TrainingTest {
 protected:
  ApiRun train(const TrainConfig& config, Loop loop) {
    ApiRun run;
    OtherTrainer trainer(config, loop);
    for (uint64_t i = 0; i < *config.max_steps; ++i) run.steps.push_back(trainer.train_step());
    const fs::path out = root_ / ("api-" + std::to_string(++runs_));
    osp_checkpoint_options_t options = OSP_CHECKPOINT_OPTIONS_INIT;
    const std::string json = trainer.config_json();
    options.config_json = json.c_str();
    OSP_REQUIRE(osp_checkpoint_save(trainer.engine, out.c_str(), &options));
    OSP_REQUIRE(osp_checkpoint_wait(trainer.engine));
    run.checkpoint = files_in(fs::canonical(out / "latest"));
    run.checkpoint.erase("overspill.json");  // the position in the data is the trainer's own
    fs::remove_all(out);
    return run;
  }

  static void expect_same(const FinishedRun& native, const ApiRun& other) {
    const std::vector<Json> lines = native.steps();
    ASSERT_EQ(lines.size(), other.steps.size());
    for (size_t i = 0; i < lines.size(); ++i) {
      EXPECT_EQ(lines[i].at("loss").get<double>(), other.steps[i].loss) << i;
      EXPECT_EQ(lines[i].at("grad_norm").get<double>(), other.steps[i].grad_norm) << i;
    }
    Files files = native.checkpoint;
    files.erase("overspill.json");
    expect_same_files(files, other.checkpoint);
  }

  static void expect_same(const ApiRun& left, const ApiRun& right) {
    ASSERT_EQ(left.steps.size(), right.steps.size());
    for (size_t i = 0; i < left.steps.size(); ++i) {
      EXPECT_EQ(left.steps[i].loss, right.steps[i].loss) << i;
      EXPECT_EQ(left.steps[i].grad_norm, right.steps[i].grad_norm) << i;
    }
    expect_same_files(left.checkpoint, right.checkpoint);
  }

  using Change = std::function<void(TrainConfig&)>;
  static std::vector<std::pair<std::string, Change>> places() {
    std::vector<std::pair<std::string, Change>> all;
    for (const DeviceMode device : devices_under_test()) {
      for (const Placement tier : {Placement::nvme, Placement::host, Placement::device}) {
        constexpr const char* kNames[] = {"auto", "device", "host", "nvme"};
        all.emplace_back(
            fmt::format("{} {}", device_name(device), kNames[static_cast<size_t>(tier)]),
            [=](TrainConfig& c) {
              c.offload.device = device;
              OffloadConfig& o = c.offload;
              o.weights = o.optimizer = tier;
              if (o.update == UpdateTiming::next_forward) o.gradients = tier;
            });
      }
    }
    all.emplace_back("depth 0", [](TrainConfig& c) { c.offload.prefetch_depth = 0; });
    all.emplace_back("depth 3, one chunk a layer", [](TrainConfig& c) {
      c.offload.prefetch_depth = 3;
      c.offload.chunk_parameters = 1 << 20;
    });
    return all;
  }

  /// The native run against the other trainer's with all state in each place.
  void expect_native(const TrainConfig& config) {
    const FinishedRun native = run_fresh(config);
    for (const auto& [name, change] : places()) {
      SCOPED_TRACE(name);
      TrainConfig changed = config;
      change(changed);
      expect_same(native, train(changed, Loop::layer_major_own_sums));
    }
  }

 private:
  int runs_ = 0;
};

TEST_F(CApiTrainer, TrainsBitForBitAsTheNativeTrainer) {
  for (const Precision precision : {Precision::bf16, Precision::float32}) {
    SCOPED_TRACE(precision_name(precision));
    TrainConfig config = tiny_config();
    config.precision = precision;
    expect_native(config);
  }
}

TEST_F(CApiTrainer, UpdatesInTheBackward) {
  for (const Precision precision : {Precision::bf16, Precision::float32}) {
    SCOPED_TRACE(precision_name(precision));
    TrainConfig config = tiny_config();
    config.precision = precision;
    update_in_backward(config);
    expect_native(config);
  }
}

TEST_F(CApiTrainer, TiedEmbedding) {
  expect_native(tiny_config(true));
  TrainConfig in_backward = tiny_config(true);
  update_in_backward(in_backward);
  expect_native(in_backward);
}

TEST_F(CApiTrainer, FrozenTensors) {
  TrainConfig config = tiny_config();
  config.unfrozen_parameters = {{"model.layers.1.mlp", "model.layers.2", "lm_head"}};
  expect_native(config);
}

TEST_F(CApiTrainer, EveryOptimizer) {
  for (const OptimizerKind kind :
       {OptimizerKind::lion, OptimizerKind::sgd, OptimizerKind::adafactor}) {
    SCOPED_TRACE(static_cast<int>(kind));
    TrainConfig config = tiny_config();
    config.optimizer = kind;
    config.learning_rate = 1e-3;
    if (kind == OptimizerKind::lion) config.optimizer_state = StateFormat::int8;
    expect_same(run_fresh(config), train(config, Loop::layer_major_own_sums));
    update_in_backward(config);
    expect_same(run_fresh(config), train(config, Loop::layer_major_own_sums));
  }
}

TEST_F(CApiTrainer, SumsInPagesAreThoseInSlots) {
  for (const bool tied : {false, true}) {
    for (const Precision precision : {Precision::bf16, Precision::float32}) {
      SCOPED_TRACE(fmt::format("tied {} {}", tied, precision_name(precision)));
      TrainConfig config = tiny_config(tied);
      config.precision = precision;
      config.gradient_accumulation_steps = 3;
      // The sum of a tied tensor goes by the order of the loop.
      const Loop loop = tied ? Loop::micro_batch_major : Loop::layer_major;
      const ApiRun reference = train(config, loop);
      for (const auto& [name, change] : places()) {
        SCOPED_TRACE(name);
        TrainConfig changed = config;
        change(changed);
        expect_same(reference, train(changed, Loop::micro_batch_major));
      }
      update_in_backward(config);
      expect_same(train(config, loop), train(config, Loop::micro_batch_major));
    }
  }
}

}  // namespace
}  // namespace overspill
