// The table of every key of the training file; private to engine/train. Immutable after start.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/train/config_value.h"

namespace overspill {

/// Keys in the order of documentation, sections excluded.
const std::vector<ConfigKey>& train_keys();
/// Keys of one item of `datasets` and `test_datasets`, named "datasets[].path" and so on.
const std::vector<ConfigKey>& dataset_item_keys();
/// The same of `lr_groups`.
const std::vector<ConfigKey>& lr_group_item_keys();
const ConfigKey* find_key(std::span<const ConfigKey> keys, std::string_view name);
/// Whether a dotted name is a mapping of keys: "offload", "offload.io".
bool is_section(std::string_view name);

/// Appends the rows of the optimizer.
void add_optimizer_keys(std::vector<ConfigKey>& keys);

/// Appends the rows of several ranks.
void add_rank_keys(std::vector<ConfigKey>& keys);

/// What ranks compare, "key: value" a line in the keys' order: see TrainConfig::fingerprint.
std::string fingerprint_of(const ConfigValues& values);

/// The items of a list that must have some, "path[0]" and so on.
std::vector<ConfigValue> list_items(const ConfigValue& list);
/// Applies the entries of an item's mapping; `keys` have the names prefix + entry.
void apply_item(const ConfigValue& item, const std::string& prefix, std::span<const ConfigKey> keys,
                TrainConfig& config);

// Appliers of keys with a shape of their own.
void apply_datasets(const ConfigValue& list, TrainConfig& config, bool evaluation);
void apply_nvme_paths(const ConfigValue& value, TrainConfig& config);
void apply_nvme_shares(const ConfigValue& value, TrainConfig& config);
void apply_resume(const ConfigValue& value, TrainConfig& config);
void apply_prefetch_depth(const ConfigValue& value, TrainConfig& config);
void apply_chunk_parameters(const ConfigValue& value, TrainConfig& config);
void apply_hardware_profile(const ConfigValue& value, TrainConfig& config);
void apply_block_size(const ConfigValue& value, TrainConfig& config);
void apply_io_timeout(const ConfigValue& value, TrainConfig& config);

}  // namespace overspill
