// Keys of several ranks, the arithmetic of the global batch, and what ranks compare.
#include <gtest/gtest.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "engine/base/error.h"
#include "engine/base/fd.h"
#include "engine/train/config.h"
#include "tests/unit/engine/train/config_fixture.h"

namespace overspill {
namespace {

const std::string kMinimal =
    "base_model: model\n"    // line 1
    "datasets:\n"            // line 2
    "  - path: train.bin\n"  // line 3
    "sequence_len: 128\n"    // line 4
    "learning_rate: 2e-5\n"  // line 5
    "output_dir: /out\n";    // line 6

class RankConfigTest : public test::ConfigDirectory {
 protected:
  TrainConfig load(const std::string& more, const std::vector<std::string>& overrides = {}) const {
    write_text_file(directory_ / "run.yaml", kMinimal + more);
    return load_train_config(directory_ / "run.yaml", overrides);
  }

  /// Message of the refusal of what `more` says for so many ranks.
  std::string refusal(const std::string& more, uint32_t ranks = 1) const {
    try {
      TrainConfig config = load(more);
      resolve_batch(config, ranks);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_config);
      return error.what();
    }
    return "(accepted)";
  }

  void expect_refusal(const std::string& more, const std::vector<std::string>& fragments,
                      uint32_t ranks = 1) const {
    const std::string message = refusal(more, ranks);
    for (const std::string& fragment : fragments) {
      EXPECT_NE(message.find(fragment), std::string::npos)
          << "\"" << fragment << "\" is missing in: " << message << "\nfor: " << more;
    }
  }
};

TEST_F(RankConfigTest, ReadsEveryKeyOfRanks) {
  const TrainConfig config = load(
      "zero_stage: 2\nhybrid_shard: 4\nreduce_dtype: float32\ncollective_backend: nccl\n"
      "deterministic_reduction: true\nrank_timeout: 90.5\ntrain_batch_size: 64\n");
  EXPECT_EQ(config.zero_stage, 2u);
  EXPECT_EQ(config.hybrid_shard, 4u);
  EXPECT_EQ(config.reduce_dtype, ReduceType::float32);
  EXPECT_EQ(config.collective_backend, CollectiveBackend::nccl);
  EXPECT_TRUE(config.deterministic_reduction);
  EXPECT_EQ(config.rank_timeout, 90.5);
  ASSERT_TRUE(config.global_batch);
  EXPECT_EQ(config.global_batch->sequences, 64u);
}

TEST_F(RankConfigTest, DefaultsAndWordsForThem) {
  const TrainConfig fresh, config = load("reduce_dtype: auto\nhybrid_shard: false\n");
  EXPECT_EQ(config.zero_stage, 3u);
  EXPECT_EQ(config.hybrid_shard, 0u);
  EXPECT_FALSE(config.reduce_dtype);
  EXPECT_EQ(config.rank_timeout, fresh.rank_timeout);
  EXPECT_FALSE(config.global_batch);
  EXPECT_EQ(load("hybrid_shard: true\n").hybrid_shard, kGroupIsHost);
  EXPECT_EQ(load("reduce_dtype: bf16\n").reduce_dtype, ReduceType::bf16);
  const std::string help = describe_train_keys();
  for (const char* key : {"zero_stage\n", "hybrid_shard\n", "reduce_dtype\n", "rank_timeout\n",
                          "collective_backend\n", "deterministic_reduction\n", "deepspeed\n"}) {
    EXPECT_NE(help.find(key), std::string::npos) << key;
  }
}

TEST_F(RankConfigTest, RefusesWrongValues) {
  expect_refusal("zero_stage: 4\n", {"run.yaml:7: zero_stage: found 4", "from 0 to 3"});
  expect_refusal("hybrid_shard: 1\n", {"hybrid_shard: found 1", "from 2 to 65536"});
  expect_refusal("hybrid_shard: yes\n", {"hybrid_shard: found \"yes\"", "true, false or the size"});
  expect_refusal("reduce_dtype: fp16\n", {"reduce_dtype: found \"fp16\"", "float32 or bf16"});
  expect_refusal("collective_backend: mpi\n", {"collective_backend", "auto, gloo or nccl"});
  expect_refusal("rank_timeout: 0\n", {"rank_timeout: found 0", "at least 1", "86400"});
  expect_refusal("rank_timeout: 60s\n", {"rank_timeout: found \"60s\"", "not a number"});
  expect_refusal("zero_stage: 0\nhybrid_shard: 2\n",
                 {"run.yaml:8: hybrid_shard: found \"2\"", "nothing is sharded", "run.yaml:7",
                  "`zero_stage: 3`"});
}

TEST_F(RankConfigTest, ForeignNamesGetAHint) {
  expect_refusal("ddp_backend: nccl\n", {"run.yaml:7: ddp_backend", "`collective_backend: nccl`"});
  expect_refusal("num_processes: 4\n", {"num_processes", "`overspill train --ranks N`"});
  expect_refusal("zero_optimization: {stage: 2}\n", {"zero_optimization", "`deepspeed: ds_config"});
  expect_refusal("ddp_timeout: 60\n", {"ddp_timeout", "`rank_timeout: 60`"});
}

// ---- the global batch ----

TEST_F(RankConfigTest, BatchIsCheckedOrSolvedForWhatIsMissing) {
  TrainConfig config = load("train_batch_size: 48\nmicro_batch_size: 3\n");
  resolve_batch(config, 4);
  EXPECT_EQ(config.gradient_accumulation_steps, 4u);
  EXPECT_EQ(config.micro_batch_size, 3u);

  config = load("train_batch_size: 48\ngradient_accumulation_steps: 2\n");
  resolve_batch(config, 4);
  EXPECT_EQ(config.micro_batch_size, 6u);
  EXPECT_EQ(config.gradient_accumulation_steps, 2u);

  config = load("train_batch_size: 48\n");
  resolve_batch(config, 4);
  EXPECT_EQ(config.micro_batch_size, 1u);
  EXPECT_EQ(config.gradient_accumulation_steps, 12u);

  config = load("train_batch_size: 24\nmicro_batch_size: 3\ngradient_accumulation_steps: 2\n");
  resolve_batch(config, 4);
  EXPECT_EQ(config.micro_batch_size, 3u);
  EXPECT_EQ(config.gradient_accumulation_steps, 2u);

  config = load("micro_batch_size: 3\n");
  resolve_batch(config, 4);
  EXPECT_EQ(config.gradient_accumulation_steps, 1u);
}

TEST_F(RankConfigTest, BatchThatDoesNotFitShowsTheProduct) {
  expect_refusal("train_batch_size: 32\nmicro_batch_size: 4\ngradient_accumulation_steps: 3\n",
                 {"run.yaml:7: train_batch_size: found 32",
                  "micro_batch_size 4 x gradient_accumulation_steps 3 x 2 ranks = 24 sequences"},
                 2);
  expect_refusal("train_batch_size: 32\nmicro_batch_size: 3\n",
                 {"micro_batch_size 3 x 2 ranks = 6 sequences", "no gradient_accumulation_steps",
                  "a multiple of 6"},
                 2);
  expect_refusal("train_batch_size: 32\ngradient_accumulation_steps: 5\n",
                 {"gradient_accumulation_steps 5 x 1 rank = 5 sequences", "no micro_batch_size"});
  expect_refusal("train_batch_size: 2\n", {"micro_batch_size 1 x 4 ranks = 4"}, 4);
  expect_refusal("train_batch_size: 4294967295\n", {"no gradient_accumulation_steps from 1 to 65"});
  expect_refusal("train_batch_size: 0\n", {"train_batch_size: found 0"});
}

// ---- what ranks compare ----

TEST_F(RankConfigTest, FingerprintHasOneSpellingAndNoPathsOfTheHost) {
  const TrainConfig config = load(
      "seed: 18446744073709551615\nreduce_dtype: bf16\noptimizer: adamw_torch\n"
      "adam_epsilon: 0.00000001\nlr_groups: [{name: a, modules: [x], lr: 1.0e-4}]\n"
      "offload: {host_memory: 1GiB, nvme_paths: /mnt/a, nvme_shares: [1], io: {timeout: 60s}}\n");
  EXPECT_EQ(config.fingerprint,
            "adam_epsilon: 1e-08\n"
            "base_model: model\n"
            "datasets: [{path: train.bin}]\n"
            "learning_rate: 2e-05\n"
            "lr_groups: [{lr: 0.0001, modules: [x], name: a}]\n"
            "offload.host_memory: 1073741824\n"
            "offload.io.timeout: 1m\n"
            "optimizer: adamw\n"
            "output_dir: /out\n"
            "reduce_dtype: bf16\n"
            "seed: 18446744073709551615\n"
            "sequence_len: 128\n");
}

TEST_F(RankConfigTest, FingerprintsOfOneRunAgreeHoweverItIsWritten) {
  const std::string fingerprint = load("hybrid_shard: true\n").fingerprint;
  EXPECT_EQ(load("", {"hybrid_shard=true", "base_model=/models/model/", "learning_rate=0.00002",
                      "datasets=[{path: /data/train.bin}]", "offload.nvme_paths=[/a, /b]"})
                .fingerprint,
            fingerprint);
  EXPECT_NE(load("hybrid_shard: true\nseed: 1\n").fingerprint, fingerprint);
  EXPECT_NE(load("hybrid_shard: true\n", {"output_dir=/elsewhere"}).fingerprint, fingerprint);
}

}  // namespace
}  // namespace overspill
