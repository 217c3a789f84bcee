// The lists that Slurm writes into a job's environment. Pure functions.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace overspill {

/// The first host of a list such as "node[07-10,12],other": "node07". Empty for what is no list.
std::string first_slurm_host(std::string_view list);

/// The count at `index` of a list such as "4(x2),3", which stands for 4, 4, 3.
std::optional<uint32_t> slurm_count_at(std::string_view list, uint32_t index);

}  // namespace overspill
