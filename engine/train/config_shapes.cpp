// Keys whose values are more than one scalar, or a scalar with a rule of its own.
#include "engine/train/config_keys.h"

#include <algorithm>

#include "engine/base/error.h"
#include "engine/base/units.h"
#include "engine/plan/profile_file.h"
#include "engine/train/config_names.h"

namespace overspill {
namespace {

void apply_dataset_type(const ConfigValue& value, TrainConfig& config) {
  const std::string text = value_text(value);
  try {
    config.datasets.back().type = parse_token_format(text);
  } catch (const Error& error) {
    fail(error.code(), "{}: {}: {}", value.where, value.path, error.what());
  }
}

void apply_dataset_split(const ConfigValue& value, TrainConfig& config) {
  static const std::vector<std::string> kNames = {"train", "validation"};
  config.datasets.back().evaluation = value_choice(value, kNames) == 1;
}

/// Appends one dataset; item.node is its mapping.
void apply_dataset(const ConfigValue& item, TrainConfig& config) {
  if (!item.node.IsMap()) {
    fail(ErrorCode::invalid_config,
         "{}: {}: found {}; accepted: a mapping with path, type and split; write for example "
         "`- path: train.bin`",
         item.where, item.path, describe_node(item.node));
  }
  config.datasets.emplace_back();
  apply_item(item, "datasets[].", dataset_item_keys(), config);
  if (!config.datasets.back().path.empty()) return;
  fail(ErrorCode::invalid_config,
       "{}: {}.path: found nothing; every dataset needs the path of a file; write for example "
       "`- path: train.bin`",
       item.where, item.path);
}

}  // namespace

void apply_item(const ConfigValue& item, const std::string& prefix, std::span<const ConfigKey> keys,
                TrainConfig& config) {
  for (const MappingEntry& entry : mapping_entries(item.node, item.source, item.path)) {
    const ConfigKey* const key = find_key(keys, prefix + entry.name);
    if (!key) refuse_unknown_item_key(entry, item.path, keys);
    if (entry.node.IsNull()) continue;
    key->apply({key, item.path + "." + entry.name, entry.node, entry.where, item.source}, config);
  }
}

std::vector<ConfigValue> list_items(const ConfigValue& list) {
  if (!list.node.IsSequence()) refuse_value(list);
  if (list.node.size() == 0) refuse_value(list, "an empty list");
  std::vector<ConfigValue> items;
  for (size_t i = 0; i < list.node.size(); ++i) {
    const YAML::Node node = list.node[i];
    items.push_back(
        {list.key, fmt::format("{}[{}]", list.path, i), node, list.source.at(node), list.source});
  }
  return items;
}

const std::vector<ConfigKey>& dataset_item_keys() {
  static const std::vector<ConfigKey> kKeys = {
      {"datasets[].path", "a path (relative ones start at the file's directory)", "", "train.bin",
       "A token file or a text.",
       [](const ConfigValue& value, TrainConfig& config) {
         config.datasets.back().path = value_path(value);
       }},
      {"datasets[].type", "auto, prepared, nanogpt, llmc, megatron or text", "auto", "nanogpt",
       "Format of the file; auto: detected by its content.", apply_dataset_type},
      {"datasets[].split", "train or validation", "train", "validation",
       "What the file is for; validation: only evaluation.", apply_dataset_split},
  };
  return kKeys;
}

void apply_datasets(const ConfigValue& list, TrainConfig& config, bool evaluation) {
  for (const ConfigValue& item : list_items(list)) {
    apply_dataset(item, config);
    config.datasets.back().evaluation |= evaluation;
  }
}

void apply_nvme_paths(const ConfigValue& value, TrainConfig& config) {
  std::vector<std::filesystem::path>& paths = config.offload.nvme_paths;
  if (value.node.IsScalar()) {
    paths.push_back(value_path(value));
    return;
  }
  if (!value.node.IsSequence()) refuse_value(value);
  for (size_t i = 0; i < value.node.size(); ++i) {
    const ConfigValue item = {value.key, fmt::format("{}[{}]", value.path, i), value.node[i],
                              value.source.at(value.node[i]), value.source};
    if (!item.node.IsScalar()) refuse_value(item);
    const std::filesystem::path path = value_path(item);
    if (std::find(paths.begin(), paths.end(), path) != paths.end()) {
      refuse_value(item, fmt::format("\"{}\" a second time", path.string()));
    }
    paths.push_back(path);
  }
}

void apply_nvme_shares(const ConfigValue& value, TrainConfig& config) {
  config.offload.nvme_shares.reset();
  if (is_auto(value)) return;
  if (!value.node.IsSequence() || value.node.size() == 0) refuse_value(value);
  std::vector<uint32_t> shares;
  for (size_t i = 0; i < value.node.size(); ++i) {
    const ConfigValue item = {value.key, fmt::format("{}[{}]", value.path, i), value.node[i],
                              value.source.at(value.node[i]), value.source};
    shares.push_back(static_cast<uint32_t>(value_integer(item, 1, 64)));
  }
  config.offload.nvme_shares = std::move(shares);
}

void apply_resume(const ConfigValue& value, TrainConfig& config) {
  const std::string text = value_text(value);
  const bool never = text == "false" || text == "False";
  const bool newest = text == "true" || text == "True";
  config.resume_from_checkpoint = never ? "" : newest ? "true" : value_path(value).string();
}

void apply_prefetch_depth(const ConfigValue& value, TrainConfig& config) {
  config.offload.prefetch_depth.reset();
  if (!is_auto(value)) {
    config.offload.prefetch_depth = static_cast<uint32_t>(value_integer(value, 0, 64));
  }
}

void apply_chunk_parameters(const ConfigValue& value, TrainConfig& config) {
  config.offload.chunk_parameters.reset();
  if (is_auto(value)) return;
  const uint64_t parameters = value_integer(value, 4096, uint64_t{1} << 30);
  if (parameters % 4096 != 0) {
    refuse_value(value, fmt::format("{}, which is no multiple of 4096 (the next one is {})",
                                    parameters, round_up(parameters, 4096)));
  }
  config.offload.chunk_parameters = parameters;
}

void apply_hardware_profile(const ConfigValue& value, TrainConfig& config) {
  const std::filesystem::path path = value_path(value);
  try {
    config.offload.hardware_profile = load_profile(path);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::not_found) throw;
    refuse_value(value, fmt::format("{}, which does not exist", path.string()));
  }
  const auto& drives = config.offload.hardware_profile->drives.settings;
  if (!drives) return;
  config.offload.io.block_size = drives->block_bytes;
  // The profile's depths are per drive, and nvme_paths has been read before this key.
  const auto drive_count = std::max<size_t>(1, config.offload.nvme_paths.size());
  const size_t depth = drive_count * std::max(drives->read_depth, drives->write_depth);
  config.offload.io.queue_depth = static_cast<uint32_t>(std::min<size_t>(depth, 1024));
  config.offload.io.write_depth = drives->write_depth;
}

void apply_block_size(const ConfigValue& value, TrainConfig& config) {
  const uint64_t bytes = value_bytes(value, 4 * kKiB, 64 * kMiB);
  if (bytes % 4096 != 0) {
    refuse_value(value, fmt::format("{} bytes, which is no multiple of 4096 (the next one is {})",
                                    bytes, round_up(bytes, 4096)));
  }
  config.offload.io.block_size = bytes;
}

void apply_io_timeout(const ConfigValue& value, TrainConfig& config) {
  const auto timeout = parse_duration(value_text(value));
  if (!timeout || timeout->count() < 1 || *timeout > std::chrono::hours(24)) refuse_value(value);
  config.offload.io.timeout = *timeout;
}

}  // namespace overspill
