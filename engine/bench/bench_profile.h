// Hardware profiles that are filled in by one benchmark after the other: each replaces what it
// measured and keeps the rest.
#pragma once

#include <filesystem>
#include <span>
#include <string>

#include "engine/bench/bench_host.h"
#include "engine/bench/html_page.h"
#include "engine/plan/profile.h"

namespace overspill {

/// The file's profile when there is one, else the defaults. Throws what load_profile does.
HardwareProfile load_or_new_profile(const std::filesystem::path& path);

/// Names the machine after its processor and the paths' drives, unless the profile has a name and
/// there are no paths; and notes in its sources that `benchmark` was run, instead of an earlier
/// run.
void sign_profile(const std::string& benchmark, const BenchHost& host, const Machine& machine,
                  std::span<const std::filesystem::path> paths, HardwareProfile& profile);

/// What matters most in a profile, a row each.
BenchTable profile_summary(const HardwareProfile& profile);

}  // namespace overspill
