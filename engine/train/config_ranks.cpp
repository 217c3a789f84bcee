// The keys of several ranks: what they share, how they add up gradients, how large a step is.
#include <fmt/format.h>

#include <array>

#include "engine/base/error.h"
#include "engine/train/config_key_rows.h"

namespace overspill {
namespace {

constexpr uint64_t kMostRanks = 65536;
constexpr uint64_t kMostFactor = 65536;  // of micro_batch_size and gradient_accumulation_steps

void apply_hybrid_shard(const ConfigValue& value, TrainConfig& config) {
  const std::string text = value_text(value);
  if (text == "true" || text == "false") {
    config.hybrid_shard = value_bool(value) ? kGroupIsHost : 0;
  } else {
    config.hybrid_shard = static_cast<uint32_t>(value_integer(value, 2, kMostRanks));
  }
}

std::string spell_hybrid_shard(const TrainConfig& config) {
  if (config.hybrid_shard == kGroupIsHost) return "true";
  return config.hybrid_shard == 0 ? "false" : fmt::format("{}", config.hybrid_shard);
}

void apply_reduce_dtype(const ConfigValue& value, TrainConfig& config) {
  static const std::vector<std::string> kNames = {"auto", "float32", "bf16"};
  const size_t choice = value_choice(value, kNames);
  config.reduce_dtype.reset();
  if (choice > 0) config.reduce_dtype = choice == 1 ? ReduceType::float32 : ReduceType::bf16;
}

std::string spell_reduce_dtype(const TrainConfig& config) {
  if (!config.reduce_dtype) return "auto";
  return *config.reduce_dtype == ReduceType::bf16 ? "bf16" : "float32";
}

void apply_global_batch(const ConfigValue& value, TrainConfig& config) {
  config.global_batch = {value_integer(value, 1, UINT32_MAX), value.where};
}

/// The factor that makes `known` * factor the whole; 0 when no factor in range does.
uint64_t other_factor(uint64_t whole, uint64_t known) {
  return whole % known == 0 && whole / known <= kMostFactor ? whole / known : 0;
}

[[noreturn]] void refuse_batch(const TrainConfig& config, uint32_t ranks) {
  const GlobalBatch& batch = *config.global_batch;
  const std::string ranks_text = fmt::format("{} {}", ranks, ranks == 1 ? "rank" : "ranks");
  if (!batch.derives_accumulation && !batch.derives_micro_batch) {
    fail(ErrorCode::invalid_config,
         "{}: train_batch_size: found {}, but micro_batch_size {} x gradient_accumulation_steps {} "
         "x {} = {} sequences; correct one of them, or remove gradient_accumulation_steps to have "
         "it derived",
         batch.where, batch.sequences, config.micro_batch_size, config.gradient_accumulation_steps,
         ranks_text,
         uint64_t{config.micro_batch_size} * config.gradient_accumulation_steps * ranks);
  }
  const bool accumulation = batch.derives_accumulation;
  const char* const known = accumulation ? "micro_batch_size" : "gradient_accumulation_steps";
  const char* const derived = accumulation ? "gradient_accumulation_steps" : "micro_batch_size";
  const uint64_t factor =
      accumulation ? config.micro_batch_size : config.gradient_accumulation_steps;
  fail(
      ErrorCode::invalid_config,
      "{}: train_batch_size: found {}, but {} {} x {} = {} sequences, and no {} from 1 to {} makes "
      "{} of them; write a multiple of {}, or another {} or number of ranks",
      batch.where, batch.sequences, known, factor, ranks_text, factor * ranks, derived, kMostFactor,
      batch.sequences, factor * ranks, known);
}

}  // namespace

void add_rank_keys(std::vector<ConfigKey>& keys) {
  keys.push_back({"train_batch_size", fmt::format("an integer from 1 to {}", UINT32_MAX),
                  "what follows from the factors", "64",
                  "Sequences of one optimizer step over all ranks: micro_batch_size times "
                  "gradient_accumulation_steps times ranks, checked; one of the first two may be "
                  "left out to be derived.",
                  apply_global_batch, [](const TrainConfig& config) {
                    return fmt::format("{}", config.global_batch->sequences);
                  }});
  keys.push_back(integer("zero_stage", field(&TrainConfig::zero_stage), 0, 3,
                         {"3",
                          "What the ranks share instead of copying it (DeepSpeed's stages): 1 "
                          "optimizer states, 2 also gradients, 3 also weights; 0 nothing."}));
  keys.push_back({"hybrid_shard", "true, false or the size of a group from 2 to 65536", "false",
                  "true",
                  "Share only inside groups of so many ranks, which copy each other (FSDP's "
                  "HYBRID_SHARD, MiCS); true: a group is the ranks of one host.",
                  apply_hybrid_shard, spell_hybrid_shard});
  keys.push_back({"reduce_dtype", "auto, float32 or bf16", "auto", "float32",
                  "Type in which gradients travel between ranks, always summed in float32; auto: "
                  "bf16 with `precision: bf16`, else float32.",
                  apply_reduce_dtype, spell_reduce_dtype});
  keys.push_back(choice("collective_backend", field(&TrainConfig::collective_backend),
                        {{"auto", CollectiveBackend::automatic},
                         {"gloo", CollectiveBackend::gloo},
                         {"nccl", CollectiveBackend::nccl}},
                        {"gloo",
                         "What carries data between ranks; auto: NCCL between GPUs, else "
                         "Gloo."}));
  keys.push_back(boolean("deterministic_reduction", field(&TrainConfig::deterministic_reduction),
                         "Sum gradients in the order of ranks, so that the same run on as many "
                         "ranks gives the same bits: Gloo always does, NCCL only so, and slower."));
  keys.push_back(real("rank_timeout", field(&TrainConfig::rank_timeout), {1, 86400},
                      {"60",
                       "Seconds for all ranks to meet; a rank that gives no sign of life for half "
                       "of them is lost, and the run ends and names it."}));
}

void resolve_batch(TrainConfig& config, uint32_t ranks) {
  CHECK(ranks > 0);
  if (!config.global_batch) return;
  const GlobalBatch& batch = *config.global_batch;
  const uint64_t micro = config.micro_batch_size, steps = config.gradient_accumulation_steps;
  uint64_t derived = 0;
  if (batch.derives_accumulation) {
    derived = other_factor(batch.sequences, micro * ranks);
    if (derived > 0) config.gradient_accumulation_steps = static_cast<uint32_t>(derived);
  } else if (batch.derives_micro_batch) {
    derived = other_factor(batch.sequences, steps * ranks);
    if (derived > 0) config.micro_batch_size = static_cast<uint32_t>(derived);
  } else {
    derived = micro * steps * ranks == batch.sequences;
  }
  if (derived == 0) refuse_batch(config, ranks);
}

}  // namespace overspill
