// A training file with some of its settings changed.
#include <fmt/format.h>
#include <yaml-cpp/yaml.h>

#include "engine/base/fd.h"
#include "engine/train/config.h"

namespace overspill {
namespace {

/// Sets a dotted key in nested mappings.
void put(YAML::Node node, std::string_view key, const std::string& value) {
  const size_t dot = key.find('.');
  const std::string name(key.substr(0, dot));
  if (dot == std::string_view::npos) {
    node[name] = YAML::Load(value);
  } else {
    put(node[name], key.substr(dot + 1), value);
  }
}

}  // namespace

std::string config_with_settings(const std::filesystem::path& path,
                                 std::span<const std::string> settings,
                                 const std::string& comment) {
  YAML::Node root = YAML::Load(read_text_file(path));
  for (const std::string& setting : settings) {
    const size_t equals = setting.find('=');
    put(root, std::string_view(setting).substr(0, equals), setting.substr(equals + 1));
  }
  return fmt::format("# {}\n{}\n", comment, YAML::Dump(root));
}

}  // namespace overspill
