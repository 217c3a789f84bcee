// What a run was told, in one spelling, so that ranks can tell whether they were told the same.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>

#include "engine/train/config_keys.h"

namespace overspill {
namespace {

/// Keys that hosts may well differ in, or that only name the file whose values count.
constexpr std::string_view kOfThisHost[] = {"deepspeed", "offload.hardware_profile",
                                            "offload.nvme_paths", "offload.nvme_shares"};
/// Keys whose path may start elsewhere on another host: only the name at its end counts.
constexpr std::string_view kNamed[] = {"base_model",    "base_model_config",
                                       "datasets",      "resume_from_checkpoint",
                                       "test_datasets", "val_set"};

bool contains(std::span<const std::string_view> names, std::string_view name) {
  return std::ranges::find(names, name) != names.end();
}

std::string last_component(const std::string& text) {
  const std::filesystem::path path(text);
  return (path.has_filename() ? path : path.parent_path()).filename().string();
}

/// Numbers in the shortest form, all else as it stands.
std::string spell_scalar(const std::string& text) {
  double number = 0;
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, number);
  const bool plain = text.find_first_not_of("0123456789.eE+-") == std::string::npos;
  return plain && error == std::errc() && stop == end ? fmt::format("{}", number) : text;
}

std::string spell_node(const YAML::Node& node, bool names) {
  if (node.IsSequence()) {
    std::vector<std::string> items;
    for (const auto& item : node) items.push_back(spell_node(item, names));
    return fmt::format("[{}]", fmt::join(items, ", "));
  }
  if (node.IsMap()) {
    std::map<std::string, std::string> entries;
    for (const auto& entry : node) {
      entries[entry.first.Scalar()] = spell_node(entry.second, names);
    }
    std::vector<std::string> texts;
    for (const auto& [name, value] : entries) texts.push_back(name + ": " + value);
    return fmt::format("{{{}}}", fmt::join(texts, ", "));
  }
  if (!node.IsScalar()) return "null";
  const std::string& text = node.Scalar();
  return names ? last_component(text) : spell_scalar(text);
}

}  // namespace

std::string spell_value(const ConfigValue& value) {
  if (!value.key->spell) return spell_node(value.node, false);
  TrainConfig config;
  value.key->apply(value, config);
  return value.key->spell(config);
}

std::string fingerprint_of(const ConfigValues& values) {
  std::string text;
  for (const auto& [name, value] : values) {
    if (contains(kOfThisHost, name)) continue;
    const std::string spelt =
        contains(kNamed, name) ? spell_node(value.node, true) : spell_value(value);
    text += fmt::format("{}: {}\n", name, spelt);
  }
  return text;
}

}  // namespace overspill
