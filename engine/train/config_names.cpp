// Messages for unknown keys. The hints cover keys of Axolotl files that people bring along.
#include "engine/train/config_names.h"

#include <array>
#include <vector>

#include "engine/base/error.h"
#include "engine/base/units.h"
#include "engine/train/config_keys.h"

namespace overspill {
namespace {

struct ForeignKey {
  std::string_view name;
  std::string_view hint;
};

constexpr std::string_view kFullWeights =
    "all weights are trained, adapters are not supported; remove it";
constexpr std::string_view kNoQuantized =
    "weights are bf16 or float32, and offloading is what makes them fit; remove it and set the "
    "budgets under `offload:`";
constexpr std::string_view kOffloadInstead =
    "offloading is built in; remove it and set budgets and tiers under `offload:`";
constexpr std::string_view kRanks =
    "how many ranks there are is said at the start: `overspill train --ranks N`, torchrun, mpirun "
    "or srun; remove it";
constexpr std::string_view kAttention = "there is one attention, always on; remove it";
constexpr std::string_view kPrecision = "write `precision: bf16` or `precision: float32` instead";

constexpr auto kForeignKeys = std::to_array<ForeignKey>({
    {"bf16", kPrecision},
    {"bfloat16", kPrecision},
    {"fp16", "float16 is not supported; write `precision: bf16` instead"},
    {"float16", "float16 is not supported; write `precision: bf16` instead"},
    {"tf32", "write `precision: float32` for full-precision compute, or remove it"},
    {"gradient_checkpointing",
     "every layer's activations are recomputed in the backward, always; remove it"},
    {"gradient_checkpointing_kwargs",
     "every layer's activations are recomputed in the backward, always; remove it"},
    {"val_set_size",
     "evaluation data is a file of its own; write `val_set: PATH` or a dataset with "
     "`split: validation` instead"},
    {"sample_packing", "token files are cut into full sequences, always; remove it"},
    {"eval_sample_packing", "token files are cut into full sequences, always; remove it"},
    {"pad_to_sequence_len", "token files are cut into full sequences, always; remove it"},
    {"flash_attention", kAttention},
    {"sdp_attention", kAttention},
    {"xformers_attention", kAttention},
    {"adapter", kFullWeights},
    {"lora_r", kFullWeights},
    {"lora_alpha", kFullWeights},
    {"lora_dropout", kFullWeights},
    {"lora_target_modules", kFullWeights},
    {"lora_target_linear", kFullWeights},
    {"load_in_8bit", kNoQuantized},
    {"load_in_4bit", kNoQuantized},
    {"zero_optimization", "write `zero_stage: 3`, or name the file: `deepspeed: ds_config.json`"},
    {"train_micro_batch_size_per_gpu", "write `micro_batch_size: N` instead"},
    {"per_device_train_batch_size", "write `micro_batch_size: N` instead"},
    {"gradient_clipping", "write `max_grad_norm: 1.0` instead"},
    {"steps_per_print", "write `logging_steps: N` instead"},
    {"communication_data_type", "write `reduce_dtype: float32` or `reduce_dtype: bf16` instead"},
    {"mixed_precision", kPrecision},
    {"num_processes", kRanks},
    {"world_size", kRanks},
    {"ddp_backend", "write `collective_backend: nccl` or `collective_backend: gloo` instead"},
    {"ddp_timeout", "write `rank_timeout: 60` (seconds) instead"},
    {"fsdp_sharding_strategy",
     "write `zero_stage: 3` for FULL_SHARD, 2 for SHARD_GRAD_OP, 0 for NO_SHARD, and "
     "`hybrid_shard: true` for HYBRID_SHARD"},
    {"fsdp", kOffloadInstead},
    {"fsdp_config", kOffloadInstead},
    {"max_memory", kOffloadInstead},
    {"device_map", kOffloadInstead},
    {"eval_batch_size", "evaluation uses micro_batch_size; remove it"},
    {"saves_per_epoch", "write `save_steps: N` instead"},
    {"evals_per_epoch", "write `eval_steps: N` instead"},
    {"model_type", "the model's config.json says it; remove it"},
    {"tokenizer_type", "token files need no tokenizer; remove it"},
    {"dataset_prepared_path", "token files are read in place, nothing is prepared; remove it"},
});

std::string_view foreign_hint(std::string_view name) {
  for (const ForeignKey& key : kForeignKeys) {
    if (key.name == name) return key.hint;
  }
  return {};
}

std::string joined(const std::string& section, std::string_view leaf) {
  return section.empty() ? std::string(leaf) : fmt::format("{}.{}", section, leaf);
}

std::string section_of(std::string_view name) {
  const size_t dot = name.rfind('.');
  return std::string(dot == std::string_view::npos ? std::string_view() : name.substr(0, dot));
}

/// Names that may stand in a section, its subsections included; of every section for nullptr.
std::vector<std::string> leaves_of(const std::string* section) {
  std::vector<std::string> leaves;
  const auto add = [&](std::string_view name) {
    if (!section || section_of(name) == *section) leaves.emplace_back(leaf_name(name));
  };
  for (const ConfigKey& key : train_keys()) add(key.name);
  add("offload");
  add("offload.io");
  return leaves;
}

/// The full name of the key with this leaf in another section; empty when there is none.
std::string elsewhere(std::string_view leaf) {
  for (const ConfigKey& key : train_keys()) {
    if (leaf_name(key.name) == leaf) return key.name;
  }
  return leaf == "io" ? "offload.io" : "";
}

std::string place_text(const std::string& name, bool is_override) {
  if (is_override) return fmt::format("write `--set {}=...`", name);
  const std::string section = section_of(name);
  return section.empty() ? fmt::format("move `{}` to the top level, unindented", leaf_name(name))
                         : fmt::format("write it as `{}`, indented under `{}:`", leaf_name(name),
                                       section == "offload.io" ? "io:` under `offload" : section);
}

}  // namespace

void refuse_unknown_key(const MappingEntry& entry, const std::string& section, bool is_override) {
  const std::string name = joined(section, entry.name);
  const std::string prefix = fmt::format("{}: {}: found an unknown key", entry.where, name);
  const std::string leaf(leaf_name(entry.name));
  if (const std::string_view hint = foreign_hint(leaf); !hint.empty()) {
    fail(ErrorCode::invalid_config, "{}; {}", prefix, hint);
  }
  if (const std::string other = elsewhere(leaf); !other.empty()) {
    fail(ErrorCode::invalid_config, "{}; it belongs to {}: {}", prefix,
         section_of(other).empty() ? "the top level" : section_of(other),
         place_text(other, is_override));
  }
  if (const std::string near = nearest_name(leaf, leaves_of(&section)); !near.empty()) {
    fail(ErrorCode::invalid_config, "{}; did you mean \"{}\"?", prefix, joined(section, near));
  }
  if (const std::string near = nearest_name(leaf, leaves_of(nullptr)); !near.empty()) {
    const std::string other = elsewhere(near);
    fail(ErrorCode::invalid_config, "{}; did you mean \"{}\"? {}", prefix, other,
         place_text(other, is_override));
  }
  if (is_override && name.find('[') != std::string::npos) {
    fail(ErrorCode::invalid_config,
         "{}; lists are set whole, as in `--set \"datasets=[{{path: train.bin}}]\"`", prefix);
  }
  fail(ErrorCode::invalid_config,
       "{}; remove it, or see `overspill train --help-keys` for all keys", prefix);
}

void refuse_unknown_item_key(const MappingEntry& entry, const std::string& path,
                             std::span<const ConfigKey> keys) {
  std::vector<std::string> leaves;
  for (const ConfigKey& key : keys) leaves.emplace_back(leaf_name(key.name));
  const std::string near = nearest_name(entry.name, leaves);
  fail(ErrorCode::invalid_config, "{}: {}.{}: found an unknown key; {}accepted: {}; remove it",
       entry.where, path, entry.name,
       near.empty() ? "" : fmt::format("did you mean \"{}\"? ", near), fmt::join(leaves, ", "));
}

}  // namespace overspill
