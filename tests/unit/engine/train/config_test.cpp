// The training file: every key is read, and every refusal names place, key, cause and cure.
#include "engine/train/config.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <vector>

#include "engine/base/error.h"
#include "engine/base/fd.h"
#include "engine/base/units.h"
#include "tests/unit/engine/train/config_fixture.h"

namespace overspill {
namespace {

constexpr const char* kMinimal =
    "base_model: model\n"    // line 1
    "datasets:\n"            // line 2
    "  - path: train.bin\n"  // line 3
    "sequence_len: 128\n"    // line 4
    "learning_rate: 2e-5\n"  // line 5
    "output_dir: out\n";     // line 6

class TrainConfigTest : public test::ConfigDirectory {
 protected:
  TrainConfig load(const std::string& text, const std::vector<std::string>& overrides = {}) const {
    write_text_file(directory_ / "run.yaml", text);
    return load_train_config(directory_ / "run.yaml", overrides);
  }

  /// Message of the refusal, with the file's directory removed.
  std::string refusal(const std::string& text, const std::vector<std::string>& overrides) const {
    try {
      load(text, overrides);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_config);
      std::string message = error.what();
      const std::string prefix = directory_.string() + "/";
      for (size_t at; (at = message.find(prefix)) != std::string::npos;) {
        message.erase(at, prefix.size());
      }
      return message;
    }
    return "(accepted)";
  }
};

TEST_F(TrainConfigTest, MinimalFileGetsDefaults) {
  const TrainConfig config = load(kMinimal);
  const TrainConfig fresh;
  EXPECT_EQ(config.base_model, directory_ / "model");
  EXPECT_EQ(config.output_dir, directory_ / "out");
  ASSERT_EQ(config.datasets.size(), 1u);
  EXPECT_EQ(config.datasets[0].path, directory_ / "train.bin");
  EXPECT_EQ(config.datasets[0].type, TokenFormat::automatic);
  EXPECT_FALSE(config.datasets[0].evaluation);
  EXPECT_EQ(config.sequence_len, 128u);
  EXPECT_EQ(config.learning_rate, 2e-5);
  EXPECT_EQ(config.max_grad_norm, fresh.max_grad_norm);
  EXPECT_EQ(config.offload.io.block_size, fresh.offload.io.block_size);
  EXPECT_FALSE(config.max_steps || config.offload.host_memory || config.offload.prefetch_depth);
}

TEST_F(TrainConfigTest, ReadsEveryTopLevelKey) {
  const TrainConfig config = load(
      "base_model: /models/a\nbase_model_config: shape/config.json\ninit_from_scratch: true\n"
      "datasets:\n  - {path: a.bin, type: nanogpt}\n  - {path: b.txt, type: text, split: "
      "validation}\n"
      "test_datasets:\n  - path: c.bin\nval_set: d.bin\neval_steps: 10\neval_max_sequences: 7\n"
      "sequence_len: 64\nmicro_batch_size: 2\ngradient_accumulation_steps: 3\nmax_steps: 5\n"
      "num_epochs: 0.5\nprecision: float32\nlearning_rate: 1e-4\nlr_scheduler: linear\n"
      "warmup_ratio: 0.1\noptimizer: adamw_torch_fused\nweight_decay: 0.01\nadam_beta1: 0.8\n"
      "adam_beta2: 0.95\nadam_epsilon: 1.0e-6\nmax_grad_norm: 0.5\nmax_non_finite_steps: 9\n"
      "seed: 18446744073709551615\nshuffle: false\noutput_dir: out\nsave_steps: 4\n"
      "save_total_limit: 2\nsave_only_model: true\nlogging_steps: 11\n"
      "resume_from_checkpoint: true\n");
  EXPECT_EQ(config.base_model, "/models/a");
  EXPECT_EQ(config.base_model_config, directory_ / "shape/config.json");
  EXPECT_TRUE(config.init_from_scratch);
  ASSERT_EQ(config.datasets.size(), 4u);
  EXPECT_EQ(config.datasets[0].type, TokenFormat::nanogpt);
  EXPECT_EQ(config.datasets[1].type, TokenFormat::text);
  const std::vector<bool> evaluation = {false, true, true, true};
  for (size_t i = 0; i < 4; ++i) EXPECT_EQ(config.datasets[i].evaluation, evaluation[i]) << i;
  EXPECT_EQ(config.datasets[3].path, directory_ / "d.bin");
  EXPECT_EQ(config.eval_steps, 10u);
  EXPECT_EQ(config.eval_sequences, 7u);
  EXPECT_EQ(config.micro_batch_size, 2u);
  EXPECT_EQ(config.gradient_accumulation_steps, 3u);
  EXPECT_EQ(config.max_steps, 5u);
  EXPECT_EQ(config.num_epochs, 0.5);
  EXPECT_EQ(config.precision, Precision::float32);
  EXPECT_EQ(config.learning_rate, 1e-4);
  EXPECT_EQ(config.lr_scheduler, LrScheduler::linear);
  EXPECT_EQ(config.warmup_ratio, 0.1);
  EXPECT_EQ(config.weight_decay, 0.01);
  EXPECT_EQ(config.adam_beta1, 0.8);
  EXPECT_EQ(config.adam_beta2, 0.95);
  EXPECT_EQ(config.adam_epsilon, 1e-6);
  EXPECT_EQ(config.max_grad_norm, 0.5);
  EXPECT_EQ(config.max_non_finite_steps, 9u);
  EXPECT_EQ(config.seed, UINT64_MAX);
  EXPECT_FALSE(config.shuffle);
  EXPECT_EQ(config.save_steps, 4u);
  EXPECT_EQ(config.save_total_limit, 2u);
  EXPECT_TRUE(config.save_only_model);
  EXPECT_EQ(config.logging_steps, 11u);
  EXPECT_EQ(config.resume_from_checkpoint, "true");
}

TEST_F(TrainConfigTest, ReadsEveryOffloadKey) {
  const TrainConfig config =
      load(std::string(kMinimal) +
           "warmup_steps: 6\nmax_grad_norm: 0\n"
           "offload:\n  device_memory: 2GiB\n  host_memory: \"3GB\"\n  nvme_capacity: 1TiB\n"
           "  nvme_paths: [/mnt/a, b]\n  nvme_shares: [2, 1]\n  stripe: local\n"
           "  allow_raw_devices: true\n  weights: host\n  optimizer: nvme\n  gradients: auto\n"
           "  activations: device\n  prefetch_depth: 0\n  chunk_parameters: 8192\n"
           "  update: in_backward\n  device: discrete\n"
           "  io: {backend: threads, block_size: 64KiB, queue_depth: 1024, write_depth: 9,\n"
           "       verify: false, timeout: 1500ms}\n");
  const OffloadConfig& offload = config.offload;
  EXPECT_EQ(config.warmup_steps, 6u);
  EXPECT_EQ(offload.device_memory, 2 * kGiB);
  EXPECT_EQ(offload.host_memory, 3'000'000'000u);
  EXPECT_EQ(offload.nvme_capacity, kTiB);
  EXPECT_EQ(offload.nvme_paths, (std::vector<std::filesystem::path>{"/mnt/a", directory_ / "b"}));
  EXPECT_EQ(offload.nvme_shares, (std::vector<uint32_t>{2, 1}));
  EXPECT_EQ(offload.stripe, StripeOver::local);
  EXPECT_TRUE(offload.allow_raw_devices);
  EXPECT_EQ(offload.weights, Placement::host);
  EXPECT_EQ(offload.optimizer, Placement::nvme);
  EXPECT_EQ(offload.gradients, Placement::automatic);
  EXPECT_EQ(offload.activations, Placement::device);
  EXPECT_EQ(offload.prefetch_depth, 0u);
  EXPECT_EQ(offload.chunk_parameters, 8192u);
  EXPECT_EQ(offload.update, UpdateTiming::in_backward);
  EXPECT_EQ(offload.device, DeviceMode::discrete);
  EXPECT_EQ(offload.io.backend, IoBackend::threads);
  EXPECT_EQ(offload.io.block_size, 64 * kKiB);
  EXPECT_EQ(offload.io.queue_depth, 1024u);
  EXPECT_EQ(offload.io.write_depth, 9u);
  EXPECT_FALSE(offload.io.verify);
  EXPECT_EQ(offload.io.timeout, std::chrono::milliseconds(1500));
}

TEST_F(TrainConfigTest, ReadsWhatTrainsAndHowFast) {
  EXPECT_FALSE(load(kMinimal).unfrozen_parameters.has_value());
  const TrainConfig config = load(std::string(kMinimal) +
                                  "unfrozen_parameters: ['^model.layers.2[0-9]', lm_head]\n"
                                  "lr_groups:\n  - {name: a, modules: [mlp, norm], lr: 1e-4}\n"
                                  "  - name: b\n    modules: [lm_head]\n    lr: 0.5\n");
  EXPECT_EQ(config.unfrozen_parameters,
            (std::vector<std::string>{"^model.layers.2[0-9]", "lm_head"}));
  ASSERT_EQ(config.lr_groups.size(), 2u);
  EXPECT_EQ(config.lr_groups[0].name, "a");
  EXPECT_EQ(config.lr_groups[0].modules, (std::vector<std::string>{"mlp", "norm"}));
  EXPECT_EQ(config.lr_groups[0].learning_rate, 1e-4);
  EXPECT_EQ(config.lr_groups[1].learning_rate, 0.5);
}

TEST_F(TrainConfigTest, AutoAndEmptyValuesMeanDefaults) {
  const TrainConfig config =
      load(std::string(kMinimal) +
           "resume_from_checkpoint:\nmax_steps: ~\noffload:\n  host_memory: auto\n"
           "  prefetch_depth: auto\n  chunk_parameters: auto\n  nvme_paths: /mnt/one\n  io:\n");
  EXPECT_EQ(config.resume_from_checkpoint, "");
  EXPECT_FALSE(config.max_steps || config.offload.host_memory || config.offload.prefetch_depth ||
               config.offload.chunk_parameters);
  EXPECT_EQ(config.offload.nvme_paths, (std::vector<std::filesystem::path>{"/mnt/one"}));
}

TEST_F(TrainConfigTest, ResumePathIsResolved) {
  EXPECT_EQ(load(std::string(kMinimal) + "resume_from_checkpoint: out/checkpoint-5\n")
                .resume_from_checkpoint,
            (directory_ / "out/checkpoint-5").string());
  EXPECT_EQ(load(std::string(kMinimal) + "resume_from_checkpoint: false\n").resume_from_checkpoint,
            "");
}

TEST_F(TrainConfigTest, OverridesReplaceAndResolveAgainstTheCurrentDirectory) {
  const TrainConfig config =
      load(std::string(kMinimal) + "max_steps: 3\noffload: {host_memory: 1GiB, weights: host}\n",
           {"offload.host_memory=2GiB", "offload.nvme_paths=[/a, b]", "sequence_len=256",
            "max_steps=null", "output_dir=elsewhere", "offload.io.queue_depth=8",
            "offload.io={block_size: 8192}", "datasets=[{path: x.bin}, {path: y.bin}]",
            "sequence_len=512"});
  EXPECT_EQ(config.offload.host_memory, 2 * kGiB);
  EXPECT_EQ(config.offload.weights, Placement::host);
  EXPECT_EQ(config.offload.nvme_paths, (std::vector<std::filesystem::path>{"/a", "b"}));
  EXPECT_EQ(config.sequence_len, 512u);
  EXPECT_FALSE(config.max_steps);
  EXPECT_EQ(config.output_dir, "elsewhere");
  EXPECT_EQ(config.offload.io.queue_depth, 8u);
  EXPECT_EQ(config.offload.io.block_size, 8192u);
  ASSERT_EQ(config.datasets.size(), 2u);
  EXPECT_EQ(config.datasets[1].path, "y.bin");
}

TEST_F(TrainConfigTest, OverrideRescuesWrongValueInFile) {
  EXPECT_EQ(load(std::string(kMinimal) + "seed: many\n", {"seed=1"}).seed, 1u);
}

TEST_F(TrainConfigTest, MissingFileIsNotFound) {
  try {
    load_train_config(directory_ / "absent.yaml");
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::not_found);
    EXPECT_NE(std::string(error.what()).find("absent.yaml"), std::string::npos);
  }
}

TEST_F(TrainConfigTest, HelpListsEveryKeyWithItsDefault) {
  const std::string help = describe_train_keys();
  for (const char* part :
       {"base_model\n", "datasets[].split\n", "offload.io.queue_depth\n", "default: 16",
        "default: cosine", "default: 1e-08", "an integer from 1 to 1048576; required",
        "default: a third of the machine's memory", "default: 1.00 MiB"}) {
    EXPECT_NE(help.find(part), std::string::npos) << part;
  }
}

// ---- refusals ----

struct Refusal {
  std::string text;  ///< appended to kMinimal
  std::vector<std::string> overrides;
  std::vector<std::string> fragments;  ///< place, key, cause, cure
};

class TrainConfigRefusal : public TrainConfigTest {
 protected:
  void expect_all(const std::string& base, const std::vector<Refusal>& cases) const {
    for (const Refusal& one : cases) {
      const std::string message = refusal(base + one.text, one.overrides);
      for (const std::string& fragment : one.fragments) {
        EXPECT_NE(message.find(fragment), std::string::npos)
            << "\"" << fragment << "\" is missing in: " << message << "\nfor: " << one.text
            << testing::PrintToString(one.overrides);
      }
    }
  }
};

TEST_F(TrainConfigRefusal, UnknownKeysNameTheNearestOrTheirSection) {
  expect_all(
      kMinimal,
      {{"sequence_length: 9\n",
        {},
        {"run.yaml:7: sequence_length", "did you mean", "sequence_len"}},
       {"host_memory: 1GiB\n", {}, {"run.yaml:7: host_memory", "belongs to offload", "`offload:`"}},
       {"block_size: 4KiB\n", {}, {"belongs to offload.io", "`io:` under `offload:`"}},
       {"offload:\n  max_steps: 3\n", {}, {"run.yaml:8: offload.max_steps", "to the top level"}},
       {"offload:\n  host_memry: 1\n", {}, {"run.yaml:8: ", "\"offload.host_memory\"?"}},
       {"host_memry: 1\n", {}, {"did you mean \"offload.host_memory\"?", "`offload:`"}},
       {"offload:\n  io:\n    que_depth: 1\n", {}, {":9: offload.io.que_depth", "queue_depth\"?"}},
       {"zebra: 1\n", {}, {"run.yaml:7: zebra: found an unknown key", "--help-keys"}},
       {"test_datasets:\n  - path: a\n    tpye: text\n",
        {},
        {"run.yaml:9: test_datasets[0].tpye", "did you mean \"type\"?", "path, type, split"}},
       {"",
        {"host_memory=1GiB"},
        {"--set host_memory=1GiB: host_memory", "--set offload.host_mem"}},
       {"", {"offload.hots_memory=1"}, {"--set offload.hots_memory=1", "offload.host_memory\"?"}},
       {"",
        {"datasets[0].path=x"},
        {"datasets[0].path: found an unknown key; lists are set whole"}},
       {"", {"seed.low=1"}, {"--set seed.low=1: seed.low: found an unknown key"}}});
}

TEST_F(TrainConfigRefusal, ForeignKeysGetAHint) {
  expect_all(kMinimal,
             {{"bf16: true\n", {}, {"run.yaml:7: bf16", "`precision: bf16`"}},
              {"gradient_checkpointing: true\n", {}, {"gradient_checkpointing", "always"}},
              {"val_set_size: 0.05\n", {}, {"val_set_size", "`val_set: PATH`"}},
              {"adapter: lora\n", {}, {"run.yaml:7: adapter", "not supported", "remove it"}},
              {"lora_r: 8\n", {}, {"lora_r", "not supported"}},
              {"flash_attention: true\n", {}, {"flash_attention", "remove it"}},
              {"sample_packing: true\n", {}, {"sample_packing", "full sequences"}}});
}

TEST_F(TrainConfigRefusal, WrongTypesAndRanges) {
  expect_all(
      kMinimal,
      {{"max_steps: 1.5\n",
        {},
        {"run.yaml:7: max_steps: found 1.5", "fraction", "`max_steps: 1000`"}},
       {"max_steps: 1e3\n", {}, {"max_steps: found 1e3", "(write 1000)"}},
       {"max_steps: 100.0\n", {}, {"max_steps: found 100.0", "(write 100)"}},
       {"max_steps: \"100\"\n", {}, {"max_steps: found the string \"100\"", "remove the quotes"}},
       {"max_steps: lots\n", {}, {"\"lots\", which is not a number", "an integer of at least 1"}},
       {"max_steps: 0\n", {}, {"max_steps: found 0", "out of range", "default: by num_epochs"}},
       {"seed: -1\n", {}, {"seed: found -1", "out of range"}},
       {"seed: 18446744073709551616\n", {}, {"seed: found 18446744073709551616", "out of range"}},
       {"seed: [1]\n", {}, {"run.yaml:7: seed: found a list", "`seed: 1`"}},
       {"micro_batch_size: 70000\n", {}, {"micro_batch_size", "from 1 to 65536", "default: 1"}},
       {"shuffle: yes\n", {}, {"shuffle: found \"yes\"", "true or false"}},
       {"shuffle: \"true\"\n", {}, {"shuffle: found the string", "remove the quotes"}},
       {"precision: fp32\n", {}, {"precision: found \"fp32\"", "bf16 or float32"}},
       {"lr_scheduler: cosin\n", {}, {"lr_scheduler", "did you mean \"cosine\"?"}},
       {"optimizer: adagrad\n", {}, {"optimizer: found \"adagrad\"", "adamw_torch"}},
       {"adam_beta2: 1\n", {}, {"adam_beta2: found 1", "below 1"}},
       {"adam_beta1: .nan\n", {}, {"adam_beta1: found \".nan\"", "not a number"}},
       {"max_grad_norm: inf\n", {}, {"max_grad_norm: found \"inf\"", "not a number"}},
       {"weight_decay: '0.1'\n", {}, {"weight_decay: found the string", "remove the quotes"}},
       {"warmup_ratio: 3\n", {}, {"warmup_ratio: found 3", "at most 1"}},
       {"num_epochs: 0\n", {}, {"num_epochs: found 0", "above 0"}},
       {"", {"learning_rate=2e5"}, {"--set learning_rate=2e5: ", "found 2e5", "at most 10"}},
       {"", {"seed=x"}, {"--set seed=x: seed: found \"x\"", "write for example --set seed=1"}}});
}

TEST_F(TrainConfigRefusal, WrongOffloadValues) {
  expect_all(
      std::string(kMinimal) + "offload:\n",
      {{"  host_memory: 16\n", {}, {":8: offload.host_memory: found \"16\" (16 B)", "16GiB"}},
       {"  host_memory: 16G\n", {}, {"offload.host_memory: found \"16G\"", "`host_memory: 64GiB`"}},
       {"  device_memory: lots\n", {}, {"offload.device_memory: found \"lots\"", "or auto"}},
       {"  weights: disk\n", {}, {"offload.weights: found \"disk\"", "auto, device, host or nvme"}},
       {"  prefetch_depth: 65\n", {}, {"offload.prefetch_depth: found 65", "0 to 64, or auto"}},
       {"  chunk_parameters: 5000\n", {}, {"chunk_parameters: found 5000", "the next one is 8192"}},
       {"  chunk_parameters: 1MiB\n", {}, {"chunk_parameters: found \"1MiB\"", "multiple of 4096"}},
       {"  update: later\n", {}, {"offload.update", "auto, next_forward, twice or in_backward"}},
       {"  device: rocm\n", {}, {"offload.device", "cuda, unified or discrete"}},
       {"  nvme_paths: {a: b}\n", {}, {"offload.nvme_paths: found a mapping", "list of paths"}},
       {"  nvme_paths: [/a, /a]\n", {}, {"offload.nvme_paths[1]: found \"/a\" a second time"}},
       {"  nvme_paths: [/a, [/b]]\n", {}, {"offload.nvme_paths[1]: found a list"}},
       {"  nvme_shares: [0]\n", {}, {"offload.nvme_shares[0]: found 0, which is out of range"}},
       {"  nvme_shares: 2\n", {}, {"offload.nvme_shares: found \"2\"", "one per path, or auto"}},
       {"  nvme_paths: [/a, /b]\n  nvme_shares: [1]\n",
        {},
        {":9: offload.nvme_shares: found 1 numbers for 2 nvme_paths; write one for each"}},
       {"  stripe: near\n", {}, {"offload.stripe: found \"near\"", "all or local"}},
       {"  io: fast\n", {}, {":8: offload.io: found \"fast\"", "indented under `io:`"}},
       {"  io: {backend: aio}\n", {}, {"offload.io.backend", "auto, io_uring, libaio or threads"}},
       {"  io: {timeout: 30}\n",
        {},
        {":8: offload.io.timeout: found \"30\"; accepted: a time from 1ms to 24h", "default: 1m"}},
       {"  io: {timeout: 0s}\n", {}, {"offload.io.timeout: found \"0s\""}},
       {"  io: {timeout: 25h}\n", {}, {"offload.io.timeout: found \"25h\""}},
       {"  io: {block_size: 5000}\n", {}, {"block_size: found 5000 bytes", "next one is 8192"}},
       {"  io: {block_size: 1GiB}\n", {}, {"block_size: found \"1GiB\"", "4KiB to 64MiB"}},
       {"  io: {queue_depth: 0}\n", {}, {"queue_depth: found 0", "from 1 to 1024"}}});
}

TEST_F(TrainConfigRefusal, WrongDatasets) {
  const std::string base = "base_model: m\nsequence_len: 8\nlearning_rate: 1e-3\noutput_dir: o\n";
  expect_all(
      base, {{"datasets: a.bin\n", {}, {"run.yaml:5: datasets: found \"a.bin\"", "a list"}},
             {"datasets: []\n", {}, {"datasets: found an empty list", "[{path: train.bin}]"}},
             {"datasets:\n  - a.bin\n", {}, {":6: datasets[0]: found \"a.bin\"", "`- path: "}},
             {"datasets:\n  - type: text\n", {}, {":6: datasets[0].path: found nothing"}},
             {"datasets:\n  - path: a\n    type: alpaca\n", {}, {":7: datasets[0].type: "}},
             {"datasets:\n  - path: a\n    split: eval\n", {}, {"split", "train or validation"}},
             {"datasets:\n  - path: a\n    path: b\n", {}, {":7: datasets[0].path", "second time"}},
             {"datasets:\n  - {path: a, split: validation}\n", {}, {"nothing to train on"}}});
}

TEST_F(TrainConfigRefusal, WrongParameterGroups) {
  expect_all(
      kMinimal,
      {{"unfrozen_parameters: lm_head\n",
        {},
        {":7: unfrozen_parameters: found \"lm_head\"", "list"}},
       {"unfrozen_parameters: []\n", {}, {"unfrozen_parameters: found an empty list"}},
       {"unfrozen_parameters:\n  - a\n  - (b\n",
        {},
        {":9: unfrozen_parameters[1]: found \"(b\", which is no regular expression"}},
       {"unfrozen_parameters: ['^a$[:32000]']\n",
        {},
        {":7: unfrozen_parameters[0]: found \"^a$[:32000]\"", "whole or not at all"}},
       {"lr_groups: {name: a}\n", {}, {":7: lr_groups: found a mapping"}},
       {"lr_groups: [a]\n", {}, {":7: lr_groups[0]: found \"a\""}},
       {"lr_groups:\n  - {name: a, modules: [b], lr: 0}\n", {}, {":8: lr_groups[0].lr: found 0"}},
       {"lr_groups: [{name: a, modules: b, lr: 1}]\n", {}, {"[0].modules: found \"b\"", "a list"}},
       {"lr_groups: [{name: a, lr: 1e-3}]\n", {}, {"lr_groups[0].modules: found nothing"}},
       {"lr_groups: [{name: a, modules: [b]}]\n", {}, {"lr_groups[0].lr: found nothing"}},
       {"lr_groups:\n  - {name: a, module: [b], lr: 1}\n",
        {},
        {":8: lr_groups[0].module: found an unknown key", "did you mean \"modules\"?"}},
       {"lr_groups:\n  - {name: a, modules: [b], lr: 1}\n  - {name: a, modules: [c], lr: 1}\n",
        {},
        {":9: lr_groups[1].name: found \"a\" a second time"}}});
}

TEST_F(TrainConfigRefusal, MissingKeys) {
  expect_all("",
             {{"", {}, {"run.yaml: base_model: this key is missing", "init_from_scratch"}},
              {"base_model: m\n", {}, {"run.yaml: datasets: this key is missing", "Add"}},
              {"base_model: m\ndatasets: [{path: a}]\n", {}, {"sequence_len: this key is"}},
              {"init_from_scratch: true\n", {}, {":1: init_from_scratch", "base_model_config"}}});
  for (const std::string key : {"sequence_len", "learning_rate", "output_dir"}) {
    expect_all(kMinimal, {{"", {key + "=null"}, {"run.yaml: " + key + ": this key is missing"}}});
  }
}

TEST_F(TrainConfigRefusal, Contradictions) {
  expect_all(
      kMinimal,
      {{"offload: {update: in_backward}\n",
        {},
        {"run.yaml:7: offload.update", "max_grad_norm is 1 by default", "`max_grad_norm: 0`",
         "`update: next_forward`"}},
       {"max_grad_norm: 0.5\noffload: {update: in_backward}\n",
        {},
        {"run.yaml:8: offload.update", "max_grad_norm is 0.5;"}},
       {"max_grad_norm: 0\noffload:\n  update: in_backward\n  gradients: host\n",
        {},
        {"run.yaml:10: offload.gradients: found \"host\"", "never stored", "remove"}},
       {"offload: {activations: nvme}\n",
        {},
        {"run.yaml:7: offload.activations", "nvme_paths: [/mnt/nvme0]", "`activations: host`"}},
       {"", {"offload.weights=nvme"}, {"--set offload.weights=nvme: offload.weights"}},
       {"warmup_steps: 3\nwarmup_ratio: 0.1\n",
        {},
        {"run.yaml:8: warmup_ratio", "warmup_steps: 3 (at run.yaml:7)", "keep one"}},
       {"eval_steps: 5\n", {}, {"run.yaml:7: eval_steps", "no evaluation data", "val_set"}}});
}

TEST_F(TrainConfigRefusal, BrokenYaml) {
  expect_all(
      "", {{"a: [1, 2\nb: 3\n", {}, {"run.yaml:", "not valid YAML at column"}},
           {"seed: 1\n\tshuffle: true\n", {}, {"run.yaml:2: not valid YAML", "indent"}},
           {"- a\n- b\n", {}, {"run.yaml: found a list", "a mapping of keys"}},
           {"seed: 1\n---\nseed: 2\n", {}, {"found 2 YAML documents", "keep one"}},
           {"seed: 1\nseed: 2\n", {}, {"run.yaml:2: seed", "second time", "run.yaml:1"}},
           {"offload: {device: unified, device: unified}\n", {}, {"offload.device", "second"}},
           {"[a, b]: 1\n", {}, {"run.yaml:1: found a list as a key"}},
           {"", {"seed"}, {"--set seed: found no `=`", "key=value"}},
           {"", {"=5"}, {"--set =5: found no key"}},
           {"", {"seed="}, {"--set seed=: found no value", "key=null"}},
           {"", {"offload.nvme_paths=[/a"}, {"--set offload.nvme_paths=[/a", "not valid YAML"}}});
}

}  // namespace
}  // namespace overspill
