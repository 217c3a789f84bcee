// DeepSpeed's configuration (ds_config.json) read as settings of this trainer: each of its keys is
// applied, listed as not needed, or refused; none is ignored. Private to engine/train.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "engine/train/config_value.h"

namespace overspill {

/// What a file comes to: values of our keys, and a line of report for each key that it holds.
struct DeepSpeedConfig {
  std::vector<ConfigValue> values;  ///< each key once
  std::vector<std::string> report;
};

/// Throws Error(invalid_config) with file:line, key, what is wrong and the cure: broken JSON, a key
/// twice, an unknown key (nearest known named), what this trainer cannot do, two keys that
/// disagree.
DeepSpeedConfig read_deepspeed_config(const std::filesystem::path& path);

/// Adds the values of the file that `deepspeed` names, if any, where there is none yet, and logs
/// the report. Refuses a value that differs from one of the YAML file; overrides win.
void put_deepspeed(ConfigValues& values);

/// The table of all DeepSpeed keys in Markdown, for docs/deepspeed.md.
std::string describe_deepspeed_keys();

}  // namespace overspill
