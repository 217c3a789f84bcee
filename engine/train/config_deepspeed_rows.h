// Rows of the table of DeepSpeed's keys by what becomes of them. Private to engine/train.
#pragma once

#include "engine/train/config_deepspeed_keys.h"

namespace overspill::deepspeed {

inline DeepSpeedKey applied(std::string_view path, std::string_view ours,
                            DeepSpeedConversion convert, std::string_view text = {}) {
  return {.path = path, .ours = ours, .text = text, .convert = convert};
}

inline DeepSpeedKey not_needed(std::string_view path, std::string_view text,
                               std::string_view members = {}) {
  return {.path = path, .action = DeepSpeedAction::not_needed, .text = text, .members = members};
}

inline DeepSpeedKey refused(std::string_view path, std::string_view harmless,
                            std::string_view text) {
  return {.path = path, .action = DeepSpeedAction::refused, .text = text, .harmless = harmless};
}

/// A section that asks for something only when its `gate` has another value than the harmless.
inline DeepSpeedKey gated_section(std::string_view path, std::string_view gate,
                                  std::string_view harmless, std::string_view text,
                                  std::string_view members) {
  DeepSpeedKey key = refused(path, harmless, text);
  key.gate = gate;
  key.members = members;
  return key;
}

inline DeepSpeedKey refused_section(std::string_view path, std::string_view text,
                                    std::string_view members) {
  return gated_section(path, "enabled", "false", text, members);
}

/// Rows of the sections beside training itself.
std::vector<DeepSpeedKey> section_rows();

}  // namespace overspill::deepspeed
