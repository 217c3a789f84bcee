// The checks that nlohmann's parser leaves out: it keeps the last of two equal keys silently, and
// takes a NUL byte for the end of the text.
#include "engine/model/strict_json.h"

#include <unordered_set>
#include <vector>

#include "engine/base/error.h"

namespace overspill {
namespace {

using nlohmann::json;

// Name -> entry -> array is all that these files need; deeper nesting only costs memory.
constexpr int kMaxDepth = 3;
constexpr size_t kBriefLength = 80;

}  // namespace

json parse_strict_json(const std::string& text, const std::string& where,
                       const std::string& remedy) {
  if (text.find('\0') != std::string::npos) {
    fail(ErrorCode::invalid_file, "{}: NUL byte in the JSON text; {}", where, remedy);
  }
  std::vector<std::unordered_set<std::string>> open_objects;
  const auto check = [&](int depth, json::parse_event_t event, json& value) {
    if (depth > kMaxDepth) {
      fail(ErrorCode::invalid_file, "{}: JSON nested deeper than {} levels; {}", where, kMaxDepth,
           remedy);
    }
    if (event == json::parse_event_t::object_start) open_objects.emplace_back();
    if (event == json::parse_event_t::object_end) open_objects.pop_back();
    if (event == json::parse_event_t::key &&
        !open_objects.back().insert(value.get<std::string>()).second) {
      fail(ErrorCode::invalid_file, "{}: \"{}\" appears twice; {}", where, value.get<std::string>(),
           remedy);
    }
    return true;
  };
  try {
    return json::parse(text, check);
  } catch (const json::exception& error) {
    fail(ErrorCode::invalid_file, "{}: invalid JSON: {}; {}", where, error.what(), remedy);
  }
}

std::string brief_json(const json& value) {
  std::string text = value.dump(-1, ' ', false, json::error_handler_t::replace);
  if (text.size() > kBriefLength) text = text.substr(0, kBriefLength - 3) + "...";
  return text;
}

}  // namespace overspill
