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
const ConfigKey* find_key(std::span<const ConfigKey> keys, std::string_view name);
/// Whether a dotted name is a mapping of keys: "offload", "offload.io".
bool is_section(std::string_view name);

/// Appends the rows of the optimizer.
void add_optimizer_keys(std::vector<ConfigKey>& keys);

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
