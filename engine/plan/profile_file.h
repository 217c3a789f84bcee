// Hardware profiles as YAML files: what was measured on a machine or published about one, for
// plans. Pure functions besides the file itself; format in docs/profiles.md.
#pragma once

#include <filesystem>
#include <string>

#include "engine/plan/profile.h"

namespace overspill {

/// The file's values over the defaults. Throws Error(not_found), or Error(invalid_config) naming
/// file, line, key and what is accepted.
HardwareProfile load_profile(const std::filesystem::path& path);

/// Everything in the profile that differs from the defaults. Each line of `comment` becomes one of
/// the file's head.
std::string profile_text(const HardwareProfile& profile, const std::string& comment);

/// Writes profile_text, whole or not at all.
void save_profile(const std::filesystem::path& path, const HardwareProfile& profile,
                  const std::string& comment);

}  // namespace overspill
