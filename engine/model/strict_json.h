// JSON as model files may hold it: no duplicate keys, no NUL bytes, no deep nesting.
// Pure function.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace overspill {

/// Parses `text`. Throws Error(invalid_file): `where`, the violation, and `remedy`.
nlohmann::json parse_strict_json(const std::string& text, const std::string& where,
                                 const std::string& remedy);

/// A value as it is written, cut to a length that suits a message.
std::string brief_json(const nlohmann::json& value);

}  // namespace overspill
