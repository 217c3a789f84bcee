// The table of DeepSpeed's keys: what becomes of each. Immutable; private to engine/train.
#pragma once

#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/train/config_value.h"

namespace overspill {

struct DeepSpeedKey;

/// One entry of a DeepSpeed configuration.
struct DeepSpeedEntry {
  const DeepSpeedKey* key;
  const nlohmann::ordered_json& value;
  const nlohmann::ordered_json& section;  ///< the object that holds it
  std::string where;
};

struct DeepSpeedSetting {
  std::string key;  ///< ours
  YAML::Node node;
};

/// None: the value asks for nothing, and the row's text says why.
using DeepSpeedConversion = std::vector<DeepSpeedSetting> (*)(const DeepSpeedEntry&);

enum class DeepSpeedAction : uint8_t { applied, not_needed, refused };

struct DeepSpeedKey {
  std::string_view path;
  DeepSpeedAction action = DeepSpeedAction::applied;
  std::string_view ours = {};  ///< keys of ours, of an applied one
  std::string_view text = {};  ///< why it is not needed, or what to do instead
  DeepSpeedConversion convert = nullptr;
  /// Values of a refused key that ask for nothing, as JSON, '|' between them. Of a section with a
  /// `gate`, values of that entry.
  std::string_view harmless = {};
  std::string_view gate = {};
  /// Names inside a section that is treated as one, blanks between them; "*": any.
  std::string_view members = {};
};

std::span<const DeepSpeedKey> deepspeed_keys();

/// Throws Error(invalid_config): "where: path: found ...; " and the cure.
[[noreturn]] void refuse_entry(const DeepSpeedEntry& entry, std::string_view cure);

// Conversions, by what the value is in DeepSpeed.
namespace deepspeed {
std::vector<DeepSpeedSetting> as_it_is(const DeepSpeedEntry& entry);
std::vector<DeepSpeedSetting> betas(const DeepSpeedEntry& entry);
std::vector<DeepSpeedSetting> optimizer_type(const DeepSpeedEntry& entry);
std::vector<DeepSpeedSetting> scheduler_type(const DeepSpeedEntry& entry);
std::vector<DeepSpeedSetting> bf16_enabled(const DeepSpeedEntry& entry);
std::vector<DeepSpeedSetting> bf16_states(const DeepSpeedEntry& entry);
std::vector<DeepSpeedSetting> data_type(const DeepSpeedEntry& entry);
std::vector<DeepSpeedSetting> float32_if_true(const DeepSpeedEntry& entry);
std::vector<DeepSpeedSetting> host_if_true(const DeepSpeedEntry& entry);
std::vector<DeepSpeedSetting> device(const DeepSpeedEntry& entry);
std::vector<DeepSpeedSetting> nvme_path(const DeepSpeedEntry& entry);
std::vector<DeepSpeedSetting> group_size(const DeepSpeedEntry& entry);
}  // namespace deepspeed

}  // namespace overspill
