// Hardware profiles as YAML files: what was measured on a machine, for later plans on it.
// Pure functions besides the file itself; format in docs/benchmarks.md.
#pragma once

#include <filesystem>
#include <span>
#include <string>

#include "engine/plan/profile.h"

namespace overspill {

/// The file's rates and drive settings over default_profile(). Throws Error(not_found), or
/// Error(invalid_config) naming file, line, key and what is accepted.
HardwareProfile load_profile(const std::filesystem::path& path);

/// Writes `kinds` of the profile's rates (those that were measured) and its drive settings.
/// `origin` says where they come from, as one line of comment.
void save_profile(const std::filesystem::path& path, const HardwareProfile& profile,
                  std::span<const OpKind> kinds, const std::string& origin);

}  // namespace overspill
