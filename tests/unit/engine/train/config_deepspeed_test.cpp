// DeepSpeed's configuration: every key is applied, listed or refused, and none is ignored.
#include "engine/train/config_deepspeed.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <set>
#include <string>
#include <vector>

#include "engine/base/error.h"
#include "engine/base/fd.h"
#include "engine/train/config_deepspeed_keys.h"
#include "engine/train/config_keys.h"
#include "tests/unit/engine/train/config_fixture.h"

namespace overspill {
namespace {

const std::string kMinimal =
    "base_model: model\n"         // line 1
    "datasets:\n"                 // line 2
    "  - path: train.bin\n"       // line 3
    "sequence_len: 128\n"         // line 4
    "output_dir: out\n"           // line 5
    "deepspeed: ds/zero.json\n";  // line 6

class DeepSpeedConfigTest : public test::ConfigDirectory {
 protected:
  void SetUp() override {
    ASSERT_NO_FATAL_FAILURE(ConfigDirectory::SetUp());
    std::filesystem::create_directory(directory_ / "ds");
  }

  TrainConfig load(const std::string& json, const std::string& yaml = "learning_rate: 2e-5\n",
                   const std::vector<std::string>& overrides = {}) const {
    write_text_file(directory_ / "ds/zero.json", json);
    write_text_file(directory_ / "run.yaml", kMinimal + yaml);
    return load_train_config(directory_ / "run.yaml", overrides);
  }

  std::vector<std::string> report(const std::string& json) const {
    write_text_file(directory_ / "ds/zero.json", json);
    return read_deepspeed_config(directory_ / "ds/zero.json").report;
  }

  void expect_refusal(const std::string& json, const std::vector<std::string>& fragments,
                      const std::string& yaml = "learning_rate: 2e-5\n") const {
    std::string message = "(accepted)";
    try {
      load(json, yaml);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_config);
      message = error.what();
    }
    for (const std::string& fragment : fragments) {
      EXPECT_NE(message.find(fragment), std::string::npos)
          << "\"" << fragment << "\" is missing in: " << message << "\nfor: " << json;
    }
  }
};

// ---- configurations as people have them ----

TEST_F(DeepSpeedConfigTest, ReadsZero2WithValues) {
  const TrainConfig config = load(R"({
    "train_batch_size": 32, "train_micro_batch_size_per_gpu": 2, "steps_per_print": 1e2,
    "gradient_clipping": 0.5, "wall_clock_breakdown": false,
    "optimizer": {"type": "AdamW", "params": {
      "lr": 3e-5, "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 3.0e-5,
      "warmup_num_steps": 50, "total_num_steps": 1000, "warmup_type": "linear"}},
    "bf16": {"enabled": true}, "fp16": {"enabled": false, "loss_scale": 0, "hysteresis": 2},
    "communication_data_type": "fp32", "data_types": {"grad_accum_dtype": "fp32"},
    "zero_optimization": {"stage": 2, "overlap_comm": true, "contiguous_gradients": true,
      "reduce_bucket_size": 2e8, "allgather_bucket_size": 2e8, "reduce_scatter": true,
      "offload_optimizer": {"device": "cpu", "pin_memory": true}}
  })",
                                  "");
  EXPECT_EQ(config.zero_stage, 2u);
  EXPECT_EQ(config.micro_batch_size, 2u);
  ASSERT_TRUE(config.global_batch);
  EXPECT_EQ(config.global_batch->sequences, 32u);
  EXPECT_TRUE(config.global_batch->derives_accumulation);
  EXPECT_EQ(config.logging_steps, 100u);
  EXPECT_EQ(config.max_grad_norm, 0.5);
  EXPECT_EQ(config.optimizer, OptimizerKind::adamw);
  EXPECT_EQ(config.learning_rate, 3e-5);
  EXPECT_EQ(config.adam_beta1, 0.8);
  EXPECT_EQ(config.adam_beta2, 0.95);
  EXPECT_EQ(config.adam_epsilon, 1e-6);
  EXPECT_EQ(config.weight_decay, 0.1);
  EXPECT_EQ(config.lr_scheduler, LrScheduler::linear);
  EXPECT_EQ(config.warmup_steps, 50u);
  EXPECT_EQ(config.max_steps, 1000u);
  EXPECT_EQ(config.precision, Precision::bf16);
  EXPECT_EQ(config.reduce_dtype, ReduceType::float32);
  EXPECT_EQ(config.offload.optimizer, Placement::host);
}

TEST_F(DeepSpeedConfigTest, AutoMeansTheYamlOrItsDefault) {
  const TrainConfig config =
      load(R"({
    "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto", "loss_scale": 0},
    "optimizer": {"type": "AdamW", "params": {
      "lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {
      "warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
    "zero_optimization": {"stage": 3,
      "offload_optimizer": {"device": "cpu", "pin_memory": true},
      "offload_param": {"device": "none", "pin_memory": true},
      "overlap_comm": true, "contiguous_gradients": true, "sub_group_size": 1e9,
      "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
      "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 1e9,
      "stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": true},
    "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "steps_per_print": null,
    "activation_checkpointing": null
  })",
           "learning_rate: 1e-4\nmicro_batch_size: 4\nadam_beta2: 0.9\nwarmup_ratio: 0.1\n");
  const TrainConfig fresh;
  EXPECT_EQ(config.learning_rate, 1e-4);
  EXPECT_EQ(config.micro_batch_size, 4u);
  EXPECT_EQ(config.adam_beta2, 0.9);
  EXPECT_EQ(config.warmup_ratio, 0.1);
  EXPECT_EQ(config.precision, fresh.precision);
  EXPECT_EQ(config.max_grad_norm, fresh.max_grad_norm);
  EXPECT_EQ(config.lr_scheduler, LrScheduler::constant);
  EXPECT_EQ(config.offload.optimizer, Placement::host);
  EXPECT_EQ(config.offload.weights, Placement::device);
  EXPECT_FALSE(config.global_batch || config.warmup_steps || config.max_steps);
}

TEST_F(DeepSpeedConfigTest, ReadsZeroInfinity) {
  const TrainConfig config = load(R"({
    "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 8,
      "offload_optimizer": {"device": "nvme", "nvme_path": "/mnt/a", "buffer_count": 4,
        "pipeline_read": true, "pipeline_write": true, "fast_init": false},
      "offload_param": {"device": "nvme", "nvme_path": "b", "buffer_count": 5,
        "buffer_size": 1e8, "max_in_cpu": 1e9}},
    "aio": {"block_size": 262144, "queue_depth": 32, "thread_count": 1, "single_submit": false,
      "overlap_events": true},
    "activation_checkpointing": {"partition_activations": true, "cpu_checkpointing": true}
  })");
  const std::vector<std::filesystem::path> paths = {"/mnt/a", directory_ / "ds/b"};
  EXPECT_EQ(config.offload.nvme_paths, paths);
  EXPECT_EQ(config.offload.optimizer, Placement::nvme);
  EXPECT_EQ(config.offload.weights, Placement::nvme);
  EXPECT_EQ(config.offload.activations, Placement::host);
  EXPECT_EQ(config.offload.io.block_size, 262144u);
  EXPECT_EQ(config.offload.io.queue_depth, 32u);
  EXPECT_EQ(config.hybrid_shard, 8u);
  EXPECT_EQ(config.fingerprint.find("nvme_path"), std::string::npos);
  EXPECT_NE(config.fingerprint.find("zero_stage: 3\n"), std::string::npos);
}

TEST_F(DeepSpeedConfigTest, ReadsWhatElseHasACounterpart) {
  const TrainConfig config = load(R"({
    "optimizer": {"type": "SGD", "params": {"lr": 1, "momentum": 0.5, "nesterov": false}},
    "scheduler": {"type": "WarmupCosineLR", "params": {"cos_min_ratio": 0}},
    "bfloat16": {"enabled": false}, "fp32_allreduce": true, "amp": {"enabled": false},
    "zero_optimization": {"stage": 1, "mics_shard_size": -1, "cpu_offload": true,
      "cpu_offload_param": false, "offload_param": {"device": "cpu", "nvme_path": "/unused"}}
  })",
                                  "");
  EXPECT_EQ(config.optimizer, OptimizerKind::sgd);
  EXPECT_EQ(config.learning_rate, 1);
  EXPECT_EQ(config.sgd_momentum, 0.5);
  EXPECT_EQ(config.lr_scheduler, LrScheduler::cosine);
  EXPECT_EQ(config.precision, Precision::float32);
  EXPECT_EQ(config.reduce_dtype, ReduceType::float32);
  EXPECT_EQ(config.hybrid_shard, 0u);
  EXPECT_EQ(config.offload.optimizer, Placement::host);
  EXPECT_EQ(config.offload.weights, Placement::host);
  EXPECT_TRUE(config.offload.nvme_paths.empty());
  EXPECT_EQ(load(R"({"optimizer": {"type": "Lion"},
                     "bf16": {"bf16_optimizer_states": true}})")
                .optimizer_state,
            StateFormat::bfloat16);
}

TEST_F(DeepSpeedConfigTest, ReportHasALineForEachKey) {
  const std::vector<std::string> lines = report(R"({
    "zero_optimization": {"stage": 3, "overlap_comm": true, "zero_quantized_weights": false},
    "optimizer": {"params": {"lr": "auto", "betas": [0.9, 0.95]}},
    "tensorboard": {"enabled": true, "output_path": "logs"}, "elasticity": {"enabled": false},
    "scheduler": {"type": "WarmupLR"}, "activation_checkpointing": {"cpu_checkpointing": false}
  })");
  EXPECT_EQ(lines,
            (std::vector<std::string>{
                "zero.json: zero_optimization.stage: 3 -> zero_stage: 3",
                "zero.json: zero_optimization.overlap_comm: not needed: collectives always run on "
                "their own lane",
                "zero.json: zero_optimization.zero_quantized_weights: not needed: false asks for "
                "nothing",
                "zero.json: optimizer.params.lr: auto -> learning_rate as in the YAML file, or its "
                "default",
                "zero.json: optimizer.params.betas: [0.9,0.95] -> adam_beta1: 0.9",
                "zero.json: optimizer.params.betas: [0.9,0.95] -> adam_beta2: 0.95",
                "zero.json: tensorboard: not needed: `metrics.jsonl` in output_dir has every "
                "step's numbers",
                "zero.json: elasticity: not needed: what is switched off asks for nothing",
                "zero.json: scheduler.type: \"WarmupLR\" -> lr_scheduler: constant",
                "zero.json: activation_checkpointing.cpu_checkpointing: false: not needed: "
                "true is `host`, else it is chosen by prediction",
                "zero.json: scheduler.params.warmup_type: absent: the warm-up is linear, not "
                "DeepSpeed's log"}));
}

// ---- beside the YAML file ----

TEST_F(DeepSpeedConfigTest, TheSameValueTwiceIsFine) {
  const std::string json = R"({"optimizer": {"params": {"lr": 0.00002}},
    "aio": {"block_size": 1048576}, "zero_optimization": {
      "offload_optimizer": {"device": "nvme", "nvme_path": "/mnt/a"}}})";
  const TrainConfig config = load(json,
                                  "learning_rate: 2e-5\noffload: {nvme_paths: [/mnt/a], io: "
                                  "{block_size: 1MiB}}\n");
  EXPECT_EQ(config.learning_rate, 2e-5);
  EXPECT_EQ(config.offload.nvme_paths, (std::vector<std::filesystem::path>{"/mnt/a"}));
}

TEST_F(DeepSpeedConfigTest, AnotherValueIsRefusedWithBothPlaces) {
  expect_refusal("{\n  \"zero_optimization\": {\n    \"stage\": 3\n  }\n}",
                 {"ds/zero.json:3: zero_optimization.stage: found 3", "zero_stage is 2",
                  "run.yaml:8", "\"auto\""},
                 "learning_rate: 2e-5\nzero_stage: 2\n");
  expect_refusal("{\"steps_per_print\": 10}", {"zero.json:1: steps_per_print: found 10", ":8"},
                 "learning_rate: 2e-5\nlogging_steps: 5\n");
  expect_refusal(R"({"optimizer": {"params": {"lr": 1e-4}},
                     "scheduler": {"params": {"warmup_max_lr": 2e-4}}})",
                 {"zero.json:2: scheduler.params.warmup_max_lr: found 0.0002",
                  "optimizer.params.lr says 0.0001", "zero.json:1", "our learning_rate"},
                 "");
}

TEST_F(DeepSpeedConfigTest, OverridesWin) {
  const std::string json = "{\"zero_optimization\": {\"stage\": 3}}";
  EXPECT_EQ(load(json, "learning_rate: 1\n", {"zero_stage=1"}).zero_stage, 1u);
  EXPECT_EQ(load(json, "learning_rate: 1\nzero_stage: 2\n", {"deepspeed=null"}).zero_stage, 2u);
  write_text_file(directory_ / "other.json", "{\"zero_optimization\": {\"stage\": 0}}");
  EXPECT_EQ(load(json, "learning_rate: 1\n", {"deepspeed=" + (directory_ / "other.json").string()})
                .zero_stage,
            0u);
}

TEST_F(DeepSpeedConfigTest, OurRulesHoldForItsValues) {
  expect_refusal("{\n\"train_micro_batch_size_per_gpu\": 0}",
                 {"zero.json:2: train_micro_batch_size_per_gpu: found 0", "from 1 to 65536",
                  "`micro_batch_size: 4`"});
  expect_refusal("{\"train_batch_size\": 1.5}", {"train_batch_size: found 1.5", "a fraction"});
  expect_refusal("{\"gradient_clipping\": \"1.0\"}", {"the string \"1.0\"", "quotes"});
  expect_refusal("{\"zero_optimization\": {\"stage\": 4}}", {"stage: found 4", "from 0 to 3"});
  expect_refusal("{\"zero_optimization\": {\"stage\": [3]}}", {"stage: found [3]", "one value"});
  expect_refusal("{\"aio\": {\"block_size\": 5000}}", {"aio.block_size", "multiple of 4096"});
  expect_refusal("{\"zero_optimization\": {\"offload_param\": {\"device\": \"nvme\"}}}",
                 {"offload_param.device", "found nvme but no offload.nvme_paths"});
  expect_refusal("{\"zero_optimization\": {\"stage\": 0, \"zero_hpz_partition_size\": 2}}",
                 {"hybrid_shard", "nothing is sharded", "zero.json:1"});
  expect_refusal("{\"zero_optimization\": {\"mics_shard_size\": 18446744073709551615}}",
                 {"mics_shard_size: found 18446744073709551615, which is out of range"});
}

TEST_F(DeepSpeedConfigTest, SettingsMoveIntoATunedFile) {
  load(R"({"zero_optimization": {"stage": 2, "offload_optimizer": {
             "device": "nvme", "nvme_path": "b"}}, "aio": {"queue_depth": 8}})");
  const std::vector<std::string> settings = {"offload.io.queue_depth=32"};
  write_text_file(directory_ / "tuned.yaml",
                  config_with_settings(directory_ / "run.yaml", settings, "tuned"));
  const TrainConfig tuned = load_train_config(directory_ / "tuned.yaml");
  EXPECT_EQ(tuned.zero_stage, 2u);
  EXPECT_EQ(tuned.offload.io.queue_depth, 32u);
  EXPECT_EQ(tuned.offload.nvme_paths, (std::vector<std::filesystem::path>{directory_ / "ds/b"}));
}

// ---- refusals ----

TEST_F(DeepSpeedConfigTest, RefusesWhatItCannotDo) {
  const std::vector<std::vector<std::string>> cases = {
      {R"({"fp16": {"enabled": true}})", "fp16", "float16", "\"bf16\": {\"enabled\": true}"},
      {R"({"fp16": true})", "fp16: found true"},
      {R"({"amp": {"enabled": true, "opt_level": "O1"}})", "amp", "\"bf16\""},
      {R"({"torch_autocast": {"enabled": true}})", "torch_autocast", "no torch"},
      {R"({"optimizer": {"type": "OneBitAdam"}})", "\"OneBitAdam\"", "one bit", "\"AdamW\""},
      {R"({"optimizer": {"type": "Adagrad"}})", "\"Adagrad\"", "Adam or AdamW"},
      {R"({"optimizer": {"type": "Adafactor"}})", "`optimizer: adafactor`"},
      {R"({"optimizer": {"params": {"adam_w_mode": false}}})", "adam_w_mode: found false"},
      {R"({"optimizer": {"params": {"betas": [0.9]}}})", "betas: found [0.9]", "two numbers"},
      {R"({"optimizer": {"params": {"freeze_step": 400}}})", "1-bit optimizers"},
      {R"({"scheduler": {"type": "OneCycle"}})", "\"OneCycle\"", "WarmupCosineLR"},
      {R"({"scheduler": {"params": {"warmup_type": "log"}}})", "write \"linear\""},
      {R"({"scheduler": {"params": {"warmup_min_lr": 1e-6}}})", "starts at 0"},
      {R"({"communication_data_type": "fp16"})", "\"fp32\" or \"bf16\""},
      {R"({"data_types": {"grad_accum_dtype": "bf16"}})", "add up in float32"},
      {R"({"zero_optimization": {"zero_quantized_gradients": true}})", "reduce_dtype: bf16"},
      {R"({"zero_optimization": true})", "zero_optimization: found true", "an object of keys"},
      {R"({"zero_optimization": {"offload_param": {"device": "gpu"}}})", "\"none\""},
      {R"({"zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 0.3}}})", "auto"},
      {R"({"aio": {"use_gds": true}})", "through host memory"},
      {R"({"tensor_parallel": {"autotp_size": 4}})", "not layers or tensors"},
      {R"({"pipeline": {"stages": 2}})", "pipeline", "zero_stage 3"},
      {R"({"elasticity": {"enabled": true}})", "resume with another"},
      {R"({"autotuning": {"enabled": true}})", "`overspill tune`"},
      {R"({"sparse_attention": {"mode": "fixed"}})", "attention is exact"},
      {R"({"curriculum_learning": {"enabled": true}})", "trained on whole"},
      {R"({"data_efficiency": {"enabled": true}})", "trained on whole"},
      {R"({"compression_training": {"weight_quantization": {}}})", "trained whole"},
      {R"({"checkpoint": {"use_node_local_storage": true}})", "output_dir"},
      {R"({"nebula": {"enabled": true}})", "output_dir"},
      {R"({"compile": {"deepcompile": true}})", "planned, not compiled"}};
  for (const std::vector<std::string>& one : cases) {
    expect_refusal(one[0], {one.begin() + 1, one.end()});
    expect_refusal(one[0], {"zero.json:1: "});
  }
}

TEST_F(DeepSpeedConfigTest, UnknownKeysNameTheNearest) {
  expect_refusal("{\"zero_optimisation\": {}}", {"did you mean \"zero_optimization\"?"});
  expect_refusal("{\n\"zero_optimization\": {\n\"overlap_com\": true}}",
                 {"zero.json:3: zero_optimization.overlap_com",
                  "did you mean \"zero_optimization.overlap_comm\"?"});
  expect_refusal("{\"stage\": 3}",
                 {"it belongs to zero_optimization: write it as zero_optimization.stage"});
  expect_refusal("{\"zero_optimization\": {\"stage3_prefetch_bucket\": 1}}",
                 {"\"zero_optimization.stage3_prefetch_bucket_size\"?"});
  expect_refusal("{\"tensorboard\": {\"enable\": true}}", {"\"tensorboard.enabled\"?"});
  expect_refusal("{\"wandb\": {\"xyzzy\": 1}}", {"accepted: enabled, group, team, project"});
  expect_refusal("{\"zero_optimization.stage\": 3}", {"a key that DeepSpeed does not have"});
  expect_refusal("{\"xyzzy\": 3}", {"zero.json:1: xyzzy", "docs/deepspeed.md"});
}

TEST_F(DeepSpeedConfigTest, RefusesBrokenJsonWithTheLine) {
  expect_refusal("{\n\"stage\": 1,\n\"a\": {\"b\": 1},\n\"stage\": 2}",
                 {"zero.json:4: stage: found the key a second time", "zero.json:2)"});
  expect_refusal("{\n\"zero_optimization\": {\"stage\": 1,\n\"stage\": 1}}",
                 {"zero.json:3: zero_optimization.stage", "zero.json:2)"});
  expect_refusal("{\n// ZeRO\n\"steps_per_print\": 1}", {"zero.json:2: ", "without comments"});
  expect_refusal("{\n\"steps_per_print\": 1,\n}", {"zero.json:3: ", "after the last entry"});
  expect_refusal("[1]", {"zero.json:1: found no JSON object"});
  expect_refusal("", {"zero.json:1: is not valid JSON"});
  expect_refusal("{\"steps_per_print\": Infinity}", {"zero.json:1: is not valid JSON"});
  expect_refusal("{\"gradient_clipping\": 1e999}", {"is not valid JSON"});
  expect_refusal(std::string("{}\0{", 4), {"NUL byte"});
  expect_refusal(std::string(100, '[') + std::string(100, ']'), {"32 levels"});
  std::filesystem::remove(directory_ / "ds/zero.json");
  write_text_file(directory_ / "run.yaml", kMinimal + "learning_rate: 1\n");
  try {
    load_train_config(directory_ / "run.yaml");
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("run.yaml:6: deepspeed: found "), std::string::npos);
    EXPECT_NE(std::string(error.what()).find("does not exist"), std::string::npos);
  }
}

// ---- the table and the page ----

TEST(DeepSpeedTable, RowsAreWhole) {
  std::set<std::string_view> paths;
  for (const DeepSpeedKey& key : deepspeed_keys()) {
    EXPECT_TRUE(paths.insert(key.path).second) << key.path;
    const bool applied = key.action == DeepSpeedAction::applied;
    EXPECT_EQ(key.convert != nullptr, applied) << key.path;
    EXPECT_NE(key.ours.empty() && key.text.empty(), true) << key.path;
    if (!applied || key.path == "optimizer.params.betas") continue;
    EXPECT_NE(find_key(train_keys(), key.ours), nullptr) << key.path;
  }
}

TEST(DeepSpeedPage, TableIsThatOfTheProgram) {
  const std::filesystem::path page =
      std::filesystem::path(OVERSPILL_SOURCE_DIR) / "docs/deepspeed.md";
  std::string text = read_text_file(page);
  const std::string head = "| key | what becomes of it |\n";
  const size_t begin = text.find(head), end = text.find("\n\n", begin);
  ASSERT_NE(begin, std::string::npos);
  const std::string table = text.substr(begin, end - begin + 1);
  if (std::getenv("OVERSPILL_UPDATE_GOLDENS") != nullptr) {
    write_text_file(page, text.replace(begin, table.size(), describe_deepspeed_keys()));
  } else {
    EXPECT_EQ(table, describe_deepspeed_keys());
  }
}

}  // namespace
}  // namespace overspill
