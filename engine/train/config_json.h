// Strict JSON with the line of every key. Pure function; private to engine/train.
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <string>

namespace overspill {

struct LocatedJson {
  nlohmann::ordered_json root;
  std::map<std::string, size_t> lines;  ///< of keys by dotted name: "a.b" -> 3
};

/// Throws Error(invalid_config) with `file`:line for what is no JSON object: comments and trailing
/// commas included, and for a key that an object holds twice.
LocatedJson parse_located_json(const std::string& text, const std::string& file);

}  // namespace overspill
