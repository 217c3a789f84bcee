// A training file with some of its settings changed.
#include <fmt/format.h>
#include <yaml-cpp/yaml.h>

#include "engine/base/fd.h"
#include "engine/train/config.h"
#include "engine/train/config_deepspeed.h"

namespace overspill {
namespace {

/// Sets a dotted key in nested mappings.
void put(YAML::Node node, std::string_view key, const YAML::Node& value) {
  const size_t dot = key.find('.');
  const std::string name(key.substr(0, dot));
  if (dot == std::string_view::npos) {
    node[name] = value;
  } else {
    put(node[name], key.substr(dot + 1), value);
  }
}

/// Whether nested mappings have a value for a dotted key.
bool has(const YAML::Node& node, std::string_view key) {
  const size_t dot = key.find('.');
  if (!node.IsMap()) return false;
  const YAML::Node entry = node[std::string(key.substr(0, dot))];
  if (!entry.IsDefined() || entry.IsNull()) return false;
  return dot == std::string_view::npos || has(entry, key.substr(dot + 1));
}

/// Puts the settings of a DeepSpeed configuration into the mapping that named it: changed settings
/// may differ from them, which the file could not say while it names the configuration.
void put_deepspeed_settings(YAML::Node root, const std::filesystem::path& file) {
  for (const ConfigValue& value : read_deepspeed_config(file).values) {
    if (has(root, value.key->name)) continue;
    YAML::Node node = YAML::Clone(value.node);
    if (value.key->name == "offload.nvme_paths") {  // relative to the configuration's directory
      for (YAML::Node path : node) {
        path = std::filesystem::absolute(value.source.directory / path.Scalar()).string();
      }
    }
    put(root, value.key->name, node);
  }
  root.remove("deepspeed");
}

}  // namespace

std::string config_with_settings(const std::filesystem::path& path,
                                 std::span<const std::string> settings,
                                 const std::string& comment) {
  YAML::Node root = YAML::Load(read_text_file(path));
  std::filesystem::path deepspeed;
  if (has(root, "deepspeed")) deepspeed = path.parent_path() / root["deepspeed"].Scalar();
  for (const std::string& setting : settings) {
    const size_t equals = setting.find('=');
    const YAML::Node value = YAML::Load(setting.substr(equals + 1));
    put(root, std::string_view(setting).substr(0, equals), value);
    if (setting.starts_with("deepspeed=")) deepspeed = value.IsNull() ? "" : value.Scalar();
  }
  if (!deepspeed.empty()) put_deepspeed_settings(root, deepspeed);
  return fmt::format("# {}\n{}\n", comment, YAML::Dump(root));
}

}  // namespace overspill
