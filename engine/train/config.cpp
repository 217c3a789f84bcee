// Loads the training file: collects values by dotted name, lets overrides replace them, applies the
// table of keys, then refuses what is missing or contradictory. Says nothing about whether paths
// exist or memory suffices: that is for those who open and plan.
#include "engine/train/config.h"

#include <algorithm>
#include <array>
#include <set>

#include "engine/base/error.h"
#include "engine/base/fd.h"
#include "engine/train/config_deepspeed.h"
#include "engine/train/config_keys.h"
#include "engine/train/config_names.h"

namespace overspill {
namespace {

void put_entry(const MappingEntry& entry, const std::string& section, const ConfigSource& source,
               ConfigValues& values);

void put_section(const YAML::Node& mapping, const std::string& section, const ConfigSource& source,
                 ConfigValues& values) {
  for (const MappingEntry& entry : mapping_entries(mapping, source, section)) {
    put_entry(entry, section, source, values);
  }
}

void put_entry(const MappingEntry& entry, const std::string& section, const ConfigSource& source,
               ConfigValues& values) {
  const std::string name = section.empty() ? entry.name : section + "." + entry.name;
  if (is_section(name)) {
    if (entry.node.IsNull()) return;
    if (!entry.node.IsMap()) {
      fail(ErrorCode::invalid_config,
           "{}: {}: found {}; accepted: a mapping of keys, indented under `{}:`; see `overspill "
           "train --help-keys`",
           entry.where, name, describe_node(entry.node), leaf_name(name));
    }
    put_section(entry.node, name, source, values);
    return;
  }
  const ConfigKey* const key = find_key(train_keys(), name);
  if (!key) refuse_unknown_key(entry, section, source.is_override);
  // A key without a value means its default, as in other trainers' files.
  if (entry.node.IsNull()) {
    values.erase(name);
    return;
  }
  values.insert_or_assign(name, ConfigValue{key, name, entry.node, entry.where, source});
}

YAML::Node parse_text(const std::string& text, const std::string& path) {
  try {
    const std::vector<YAML::Node> documents = YAML::LoadAll(text);
    if (documents.size() > 1) {
      fail(ErrorCode::invalid_config,
           "{}: found {} YAML documents separated by `---`; accepted: one; keep one per file", path,
           documents.size());
    }
    return documents.empty() ? YAML::Node() : documents.front();
  } catch (const YAML::Exception& error) {
    fail(ErrorCode::invalid_config,
         "{}:{}: not valid YAML at column {}: {}; correct the line (indent with spaces, quote "
         "texts that hold `: ` or ` #`)",
         path, error.mark.line + 1, error.mark.column + 1, error.msg);
  }
}

void put_file(const std::filesystem::path& path, ConfigValues& values) {
  const YAML::Node root = parse_text(read_text_file(path), path.string());
  if (root.IsNull()) return;
  if (!root.IsMap()) {
    fail(ErrorCode::invalid_config,
         "{}: found {}; accepted: a mapping of keys such as `sequence_len: 1024`; see `overspill "
         "train --help-keys`",
         path.string(), describe_node(root));
  }
  put_section(root, "", {path.string(), false, path.parent_path()}, values);
}

void put_override(const std::string& text, ConfigValues& values) {
  const ConfigSource source = {"--set " + text, true, {}};
  const size_t equals = text.find('=');
  const char* missing = nullptr;
  if (equals == std::string::npos)
    missing = "`=`";
  else if (equals == 0)
    missing = "key";
  else if (equals + 1 == text.size())
    missing = "value";
  if (missing) {
    fail(ErrorCode::invalid_config,
         "{}: found no {}; accepted: key=value, as in `--set offload.host_memory=1GiB`, and "
         "key=null for the default",
         source.name, missing);
  }
  const std::string name = text.substr(0, equals);
  MappingEntry entry = {name, source.name, YAML::Node()};
  try {
    entry.node = YAML::Load(text.substr(equals + 1));
  } catch (const YAML::Exception& error) {
    fail(ErrorCode::invalid_config,
         "{}: {}: the value is not valid YAML: {}; quote it, or write lists as [a,b]", source.name,
         name, error.msg);
  }
  const size_t dot = name.rfind('.');
  const std::string section = dot == std::string::npos ? "" : name.substr(0, dot);
  if (section.empty() || !is_section(section)) {
    put_entry(entry, "", source, values);
    return;
  }
  entry.name = name.substr(dot + 1);
  put_entry(entry, section, source, values);
}

// ---- what is missing or contradictory ----

/// Where a key was given, or the file when it was not.
std::string where_of(const ConfigValues& values, const std::string& name, const std::string& file) {
  const auto found = values.find(name);
  if (found == values.end()) return file;
  const ConfigValue& value = found->second;
  return value.source.is_deepspeed ? fmt::format("{} ({})", value.where, value.path) : value.where;
}

void require_keys(const ConfigValues& values, const std::string& file) {
  for (const ConfigKey& key : train_keys()) {
    if (!key.unset.empty()) continue;
    if (values.contains(key.name)) continue;
    fail(ErrorCode::invalid_config, "{}: {}: this key is missing; {} Add for example `{}: {}`",
         file, key.name, key.text, key.name, key.example);
  }
}

void check_model(const TrainConfig& config, const ConfigValues& values, const std::string& file) {
  if (config.init_from_scratch) {
    if (!config.base_model_config.empty() || !config.base_model.empty()) return;
    fail(ErrorCode::invalid_config,
         "{}: init_from_scratch: true needs the model's shape; add `base_model_config:` with the "
         "path of a config.json",
         where_of(values, "init_from_scratch", file));
  }
  if (!config.base_model.empty()) return;
  fail(ErrorCode::invalid_config,
       "{}: base_model: this key is missing; add `base_model:` with a Hugging Face directory, or "
       "`init_from_scratch: true` to start from random weights",
       file);
}

void check_evaluation(const TrainConfig& config, const ConfigValues& values,
                      const std::string& file) {
  const auto evaluates = [](const DatasetConfig& dataset) { return dataset.evaluation; };
  if (std::ranges::all_of(config.datasets, evaluates)) {
    fail(ErrorCode::invalid_config,
         "{}: datasets: found only `split: validation`, so nothing to train on; add a dataset "
         "without it",
         where_of(values, "datasets", file));
  }
  if (config.eval_steps == 0 || std::ranges::any_of(config.datasets, evaluates)) return;
  fail(ErrorCode::invalid_config,
       "{}: eval_steps: found {} but no evaluation data; add `val_set: PATH` or a dataset with "
       "`split: validation`, or remove eval_steps",
       where_of(values, "eval_steps", file), config.eval_steps);
}

void check_optimizer_state(const TrainConfig& config, const ConfigValues& values,
                           const std::string& file) {
  if (config.optimizer != OptimizerKind::adafactor ||
      config.optimizer_state == StateFormat::float32) {
    return;
  }
  fail(ErrorCode::invalid_config,
       "{}: optimizer_state: found {}, but adafactor keeps only averages over rows and columns, "
       "always in float32; remove optimizer_state, or choose `optimizer: adamw`",
       where_of(values, "optimizer_state", file), describe_node(values.at("optimizer_state").node));
}

void check_update(const TrainConfig& config, const ConfigValues& values, const std::string& file) {
  if (config.offload.update != UpdateTiming::in_backward) return;
  const std::string where = where_of(values, "offload.update", file);
  if (config.max_grad_norm > 0) {
    fail(ErrorCode::invalid_config,
         "{}: offload.update: in_backward updates a layer before the norm of all gradients is "
         "known, but max_grad_norm is {}{}; set `max_grad_norm: 0` (no clipping) or `update: "
         "next_forward` under `offload:`",
         where, config.max_grad_norm, values.contains("max_grad_norm") ? "" : " by default");
  }
  if (config.offload.gradients == Placement::automatic) return;
  fail(ErrorCode::invalid_config,
       "{}: offload.gradients: found {}, but with offload.update: in_backward gradients are "
       "consumed in the backward and never stored; remove offload.gradients, or set `update: "
       "next_forward` under `offload:`",
       where_of(values, "offload.gradients", file),
       describe_node(values.at("offload.gradients").node));
}

void check_placement(const TrainConfig& config, const ConfigValues& values,
                     const std::string& file) {
  if (!config.offload.nvme_paths.empty()) return;
  const std::array<std::pair<const char*, Placement>, 4> tiers = {
      {{"offload.weights", config.offload.weights},
       {"offload.optimizer", config.offload.optimizer},
       {"offload.gradients", config.offload.gradients},
       {"offload.activations", config.offload.activations}}};
  for (const auto& [name, tier] : tiers) {
    if (tier != Placement::nvme) continue;
    fail(ErrorCode::invalid_config,
         "{}: {}: found nvme but no offload.nvme_paths; add `nvme_paths: [/mnt/nvme0]` with a "
         "directory on each drive, or write `{}: host`",
         where_of(values, name, file), name, leaf_name(name));
  }
}

void check_shares(const TrainConfig& config, const ConfigValues& values, const std::string& file) {
  const OffloadConfig& offload = config.offload;
  if (!offload.nvme_shares || offload.nvme_shares->size() == offload.nvme_paths.size()) return;
  fail(ErrorCode::invalid_config,
       "{}: offload.nvme_shares: found {} numbers for {} nvme_paths; write one for each path, or "
       "remove the key",
       where_of(values, "offload.nvme_shares", file), offload.nvme_shares->size(),
       offload.nvme_paths.size());
}

void check_warmup(const TrainConfig& config, const ConfigValues& values, const std::string& file) {
  if (!config.warmup_steps || !config.warmup_ratio) return;
  fail(ErrorCode::invalid_config,
       "{}: warmup_ratio: found {} together with warmup_steps: {} (at {}); keep one of the two",
       where_of(values, "warmup_ratio", file), *config.warmup_ratio, *config.warmup_steps,
       where_of(values, "warmup_steps", file));
}

void check_ranks(const TrainConfig& config, const ConfigValues& values, const std::string& file) {
  if (config.zero_stage > 0 || config.hybrid_shard == 0) return;
  fail(
      ErrorCode::invalid_config,
      "{}: hybrid_shard: found {}, but with zero_stage: 0 (at {}) every rank has a copy of its own "
      "and nothing is sharded; remove hybrid_shard, or write `zero_stage: 3`",
      where_of(values, "hybrid_shard", file), describe_node(values.at("hybrid_shard").node),
      where_of(values, "zero_stage", file));
}

/// Which factor of train_batch_size is left to be derived, once the number of ranks is known.
void note_batch(const ConfigValues& values, TrainConfig& config) {
  if (!config.global_batch) return;
  GlobalBatch& batch = *config.global_batch;
  batch.derives_accumulation = !values.contains("gradient_accumulation_steps");
  batch.derives_micro_batch = !batch.derives_accumulation && !values.contains("micro_batch_size");
}

TrainConfig apply_values(const ConfigValues& values, const std::string& file) {
  TrainConfig config;
  for (const ConfigKey& key : train_keys()) {
    const auto found = values.find(key.name);
    if (found != values.end()) key.apply(found->second, config);
  }
  check_model(config, values, file);
  require_keys(values, file);
  check_evaluation(config, values, file);
  check_warmup(config, values, file);
  check_optimizer_state(config, values, file);
  check_update(config, values, file);
  check_placement(config, values, file);
  check_shares(config, values, file);
  check_ranks(config, values, file);
  note_batch(values, config);
  config.fingerprint = fingerprint_of(values);
  return config;
}

/// Keys of what is kept and where, and of its updates: all that is not the loop's.
bool is_state_key(const std::string& name) {
  static const std::set<std::string> kKeys = {"precision",
                                              "optimizer",
                                              "optimizer_state",
                                              "weight_decay",
                                              "adam_beta1",
                                              "adam_beta2",
                                              "adam_epsilon",
                                              "sgd_momentum",
                                              "adafactor_decay",
                                              "max_grad_norm",
                                              "max_non_finite_steps",
                                              "gradient_accumulation_steps",
                                              "seed",
                                              "unfrozen_parameters",
                                              "zero_stage",
                                              "hybrid_shard",
                                              "reduce_dtype",
                                              "collective_backend",
                                              "deterministic_reduction",
                                              "rank_timeout"};
  return name.starts_with("offload.") || kKeys.contains(name);
}

std::string describe_key(const ConfigKey& key) {
  return fmt::format("{}\n    {}\n    {}; {}\n", key.name, key.text, key.accepted,
                     key.unset.empty() ? "required" : "default: " + key.unset);
}

}  // namespace

TrainConfig load_train_config(const std::filesystem::path& path,
                              const std::vector<std::string>& overrides) {
  ConfigValues values;
  put_file(path, values);
  for (const std::string& text : overrides) put_override(text, values);
  put_deepspeed(values);
  return apply_values(values, path.string());
}

TrainConfig load_plan_config(const std::filesystem::path& path,
                             const std::vector<std::string>& overrides, bool has_drives) {
  ConfigValues given, values;
  const bool shape_only = std::filesystem::is_directory(path) || path.extension() == ".json";
  if (!shape_only) put_file(path, given);
  for (const std::string& text : overrides) put_override(text, given);
  put_deepspeed(given);
  // What a plan does not depend on, and what people leave open while they plan.
  for (const char* text :
       {"sequence_len=4096", "learning_rate=1e-5", "datasets=[{path: -}]", "output_dir=."}) {
    put_override(text, values);
  }
  if (shape_only) {
    put_override("init_from_scratch=true", values);
    put_override(fmt::format("base_model_config={:?}", std::filesystem::absolute(path).string()),
                 values);
  }
  if ((shape_only || has_drives) && !given.contains("offload.nvme_paths")) {
    put_override("offload.nvme_paths=[/]", values);
  }
  for (const auto& [name, value] : given) values.insert_or_assign(name, value);
  return apply_values(values, path.string());
}

TrainConfig parse_state_config(const std::string& text) {
  const std::string name = "configuration";
  const YAML::Node root = parse_text(text, name);
  ConfigValues given, values;
  if (!root.IsNull()) {
    if (!root.IsMap()) {
      fail(ErrorCode::invalid_config,
           "{}: found {}; accepted: a mapping of keys such as `offload: {{host_memory: 8GiB}}`",
           name, describe_node(root));
    }
    put_section(root, "", {name, false, std::filesystem::current_path()}, given);
  }
  for (const auto& [key, value] : given) {
    if (is_state_key(key)) continue;
    fail(ErrorCode::invalid_config,
         "{}: {}: this key is of the trainer, and here the program that calls is one: it has no "
         "effect; remove it",
         value.where, key);
  }
  // What a trainer's configuration has to have.
  for (const char* setting : {"sequence_len=1", "learning_rate=1", "datasets=[{path: -}]",
                              "output_dir=.", "init_from_scratch=true", "base_model_config=."}) {
    put_override(setting, values);
  }
  for (const auto& [key, value] : given) values.insert_or_assign(key, value);
  return apply_values(values, name);
}

OptimizerSettings optimizer_settings(const TrainConfig& config) {
  return {.kind = config.optimizer,
          .state = config.optimizer_state,
          .beta1 = config.adam_beta1,
          .beta2 = config.adam_beta2,
          .epsilon = config.adam_epsilon,
          .momentum = config.sgd_momentum,
          .adafactor_decay = config.adafactor_decay,
          .weight_decay = config.weight_decay,
          .seed = config.seed};
}

std::string describe_train_keys() {
  std::string text;
  for (const ConfigKey& key : train_keys()) {
    text += describe_key(key);
    if (key.name == "datasets") {
      for (const ConfigKey& item : dataset_item_keys()) text += describe_key(item);
    } else if (key.name == "lr_groups") {
      for (const ConfigKey& item : lr_group_item_keys()) text += describe_key(item);
    }
  }
  return text;
}

}  // namespace overspill
