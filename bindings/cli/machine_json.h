// The machine as JSON, alike in every command that prints it.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "offload/topology.h"

namespace overspill {

/// One object; what is unknown is null.
nlohmann::ordered_json machine_json(const Machine& machine);

/// Prints to stdout. Names from firmware may hold bytes that are not UTF-8: they are replaced.
void print_json(const nlohmann::ordered_json& json);

}  // namespace overspill
