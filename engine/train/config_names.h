// Refusals of keys that do not exist: the nearest known name, the section it belongs to, or what to
// write instead of a key that other trainers know. Pure functions; private to engine/train.
#pragma once

#include <span>
#include <string>

#include "engine/train/config_value.h"

namespace overspill {

/// `section` is "", "offload" or "offload.io"; throws Error(invalid_config).
[[noreturn]] void refuse_unknown_key(const MappingEntry& entry, const std::string& section,
                                     bool is_override);
/// The same for a key of one item of a list, `path` being "datasets[0]".
[[noreturn]] void refuse_unknown_item_key(const MappingEntry& entry, const std::string& path,
                                          std::span<const ConfigKey> keys);

}  // namespace overspill
