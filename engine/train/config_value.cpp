// Strict scalars: a quoted number is a string, a fraction is no integer, yes/no are no booleans.
#include "engine/train/config_value.h"

#include <charconv>
#include <cmath>
#include <cstdlib>
#include <map>

#include "engine/base/error.h"
#include "engine/base/units.h"

namespace overspill {
namespace {

constexpr size_t kMostTextShown = 60;

/// yaml-cpp tags quoted scalars "!" and plain ones "?".
bool is_quoted(const YAML::Node& node) {
  return node.Tag() == "!" || node.Tag() == "tag:yaml.org,2002:str";
}

const std::string& plain_scalar(const ConfigValue& value) {
  if (!value.node.IsScalar()) refuse_value(value);
  if (is_quoted(value.node)) {
    refuse_value(value, fmt::format("the string {}; remove the quotes", describe_node(value.node)));
  }
  return value.node.Scalar();
}

std::string_view without_plus(std::string_view text) {
  return text.starts_with('+') ? text.substr(1) : text;
}

/// False unless the whole text is a finite decimal number ("inf" and "nan" are not).
bool parse_real(std::string_view text, double& out) {
  text = without_plus(text);
  if (text.find_first_not_of("0123456789.eE+-") != std::string_view::npos) return false;
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), out);
  return error == std::errc() && stop == text.data() + text.size() && std::isfinite(out);
}

std::string fraction_for_integer(const std::string& text, uint64_t low, uint64_t high) {
  double real = 0;
  if (!parse_real(text, real)) return fmt::format("\"{}\", which is not a number", text);
  const bool whole = real == std::floor(real) && real >= static_cast<double>(low) &&
                     real <= static_cast<double>(high) && real < 0x1p53;
  if (whole && text.find_first_of(".eE") != std::string::npos) {
    return fmt::format("{}, which is not written as an integer (write {:.0f})", text, real);
  }
  return real == std::floor(real) ? fmt::format("{}, which is out of range", text)
                                  : fmt::format("{}, which has a fraction", text);
}

}  // namespace

std::string ConfigSource::at(const YAML::Node& node) const {
  return is_override || is_deepspeed ? name : fmt::format("{}:{}", name, node.Mark().line + 1);
}

std::vector<MappingEntry> mapping_entries(const YAML::Node& mapping, const ConfigSource& source,
                                          const std::string& path) {
  std::vector<MappingEntry> entries;
  std::map<std::string, std::string> seen;
  for (const auto& item : mapping) {
    const YAML::Node& key = item.first;
    const std::string where = source.at(key);
    if (!key.IsScalar()) {
      fail(ErrorCode::invalid_config, "{}: {}found {} as a key; accepted: a name, as in `seed: 1`",
           where, path.empty() ? "" : path + ": ", describe_node(key));
    }
    const std::string name = key.Scalar();
    const auto [first, fresh] = seen.emplace(name, where);
    if (!fresh) {
      fail(ErrorCode::invalid_config,
           "{}: {}{}: found the key a second time (first at {}); keep one of the two", where,
           path.empty() ? "" : path + ".", name, first->second);
    }
    entries.push_back({name, where, item.second});
  }
  return entries;
}

std::string_view leaf_name(std::string_view name) { return name.substr(name.rfind('.') + 1); }

std::string describe_node(const YAML::Node& node) {
  if (!node.IsDefined() || node.IsNull()) return "nothing";
  if (node.IsSequence()) return "a list";
  if (node.IsMap()) return "a mapping";
  const std::string& text = node.Scalar();
  if (text.size() <= kMostTextShown) return fmt::format("\"{}\"", text);
  return fmt::format("\"{}...\"", text.substr(0, kMostTextShown));
}

void refuse_value(const ConfigValue& value, std::string_view found) {
  const ConfigKey& key = *value.key;
  if (value.source.is_deepspeed) {
    fail(ErrorCode::invalid_config,
         "{}: {}: found {}; accepted: {}, as in `{}: {}`; or leave the key out and write {} in the "
         "YAML file",
         value.where, value.path, found, key.accepted, key.name, key.example, key.name);
  }
  const std::string example = value.source.is_override && value.path == key.name
                                  ? fmt::format("--set {}={}", key.name, key.example)
                                  : fmt::format("`{}: {}`", leaf_name(key.name), key.example);
  const std::string otherwise =
      key.unset.empty() ? "" : fmt::format(", or leave the key out (default: {})", key.unset);
  fail(ErrorCode::invalid_config, "{}: {}: found {}; accepted: {}; write for example {}{}",
       value.where, value.path, found, key.accepted, example, otherwise);
}

void refuse_value(const ConfigValue& value) { refuse_value(value, describe_node(value.node)); }

bool is_auto(const ConfigValue& value) {
  return value.node.IsScalar() && value.node.Scalar() == "auto";
}

bool value_bool(const ConfigValue& value) {
  const std::string& text = plain_scalar(value);
  if (text == "true" || text == "True" || text == "TRUE") return true;
  if (text == "false" || text == "False" || text == "FALSE") return false;
  refuse_value(value);
}

uint64_t value_integer(const ConfigValue& value, uint64_t low, uint64_t high) {
  const std::string& text = plain_scalar(value);
  const std::string_view digits = without_plus(text);
  uint64_t number = 0;
  const auto [stop, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
  const bool whole = error == std::errc() && stop == digits.data() + digits.size();
  if (!whole) refuse_value(value, fraction_for_integer(text, low, high));
  if (number < low || number > high) {
    refuse_value(value, fmt::format("{}, which is out of range", text));
  }
  return number;
}

double value_real(const ConfigValue& value, const RealRange& range) {
  const std::string& text = plain_scalar(value);
  double number = 0;
  if (!parse_real(text, number)) {
    refuse_value(value, fmt::format("\"{}\", which is not a number", text));
  }
  const bool above = range.low_open ? number > range.low : number >= range.low;
  const bool below = range.high_open ? number < range.high : number <= range.high;
  if (!above || !below) refuse_value(value, fmt::format("{}, which is out of range", text));
  return number;
}

uint64_t value_bytes(const ConfigValue& value, uint64_t low, uint64_t high) {
  if (!value.node.IsScalar()) refuse_value(value);
  uint64_t bytes = 0;
  try {
    bytes = parse_bytes(value.node.Scalar());
  } catch (const Error&) {
    refuse_value(value);
  }
  if (bytes < low || bytes > high) {
    refuse_value(value, fmt::format("\"{}\" ({}), which is out of range", value.node.Scalar(),
                                    format_bytes(bytes)));
  }
  return bytes;
}

std::string value_text(const ConfigValue& value) {
  if (!value.node.IsScalar() || value.node.Scalar().empty()) refuse_value(value);
  return value.node.Scalar();
}

std::filesystem::path value_path(const ConfigValue& value) {
  const std::string text = value_text(value);
  const char* const home = std::getenv("HOME");
  if (text.starts_with("~/") && home) return std::filesystem::path(home) / text.substr(2);
  return (value.source.directory / text).lexically_normal();
}

size_t value_choice(const ConfigValue& value, std::span<const std::string> names) {
  if (!value.node.IsScalar()) refuse_value(value);
  const std::string& text = value.node.Scalar();
  for (size_t i = 0; i < names.size(); ++i) {
    if (names[i] == text) return i;
  }
  const std::string near = nearest_name(text, names);
  if (near.empty()) refuse_value(value);
  refuse_value(value, fmt::format("\"{}\" (did you mean \"{}\"?)", text, near));
}

}  // namespace overspill
