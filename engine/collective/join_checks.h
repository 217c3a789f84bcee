// Whether a process may join a run, and the texts that say why not. Pure functions.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/collective/store_protocol.h"

namespace overspill {

/// What keeps `theirs` out of the run of which `ours`, rank 0, is a part; nothing when it fits.
std::optional<Failure> misfit(const RankHello& ours, const RankHello& theirs);

/// "ranks 2 and 3 of 4 have not joined within 60 s at node1:29500; ...".
Failure missing_ranks(std::span<const uint32_t> missing, uint32_t ranks,
                      std::chrono::milliseconds timeout, const std::string& place);

}  // namespace overspill
