// One value of the training file (or of a --set override) with the place it came from, and parsers
// that turn it into numbers, names and paths. Every refusal says where, which key, what was found,
// what is accepted and what to write instead. Pure functions; private to engine/train.
#pragma once

#include <yaml-cpp/yaml.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/train/config.h"

namespace overspill {

struct ConfigValue;

/// One row of the table of keys.
struct ConfigKey {
  std::string name;      ///< full dotted name
  std::string accepted;  ///< "an integer from 1 to 64"
  std::string unset;     ///< what holds without the key; empty: the key is required
  std::string example;   ///< a good value, as YAML
  std::string text;      ///< one or two sentences for --help-keys
  std::function<void(const ConfigValue&, TrainConfig&)> apply;
  /// The applied value in one spelling whatever the file's; absent: the YAML node's own.
  std::function<std::string(const TrainConfig&)> spell = {};
};

/// Where text came from: a file, one override, or one key of a DeepSpeed configuration.
struct ConfigSource {
  std::string name;  ///< "run.yaml", "--set key=value" or "ds_config.json:12"
  bool is_override = false;
  std::filesystem::path directory;  ///< relative paths start here
  bool is_deepspeed = false;

  /// "run.yaml:12" for a file, the name alone otherwise.
  std::string at(const YAML::Node& node) const;
};

struct ConfigValue {
  const ConfigKey* key;
  std::string path;  ///< the name with list positions: "datasets[1].path"
  YAML::Node node;
  std::string where;
  ConfigSource source;
};

/// All values of a run by the dotted names of their keys.
using ConfigValues = std::map<std::string, ConfigValue>;

struct MappingEntry {
  std::string name;
  std::string where;
  YAML::Node node;
};

/// The entries of a mapping in file order; refuses repeated keys and keys that are not names.
/// `path` names the mapping in messages ("" for the top level).
std::vector<MappingEntry> mapping_entries(const YAML::Node& mapping, const ConfigSource& source,
                                          const std::string& path);

/// The part of a dotted name after its last dot.
std::string_view leaf_name(std::string_view name);

/// What a message calls a node: `"text"`, `nothing`, `a list`, `a mapping`.
std::string describe_node(const YAML::Node& node);

/// Throws Error(invalid_config): "where: path: found ...; accepted: ...; write for example ...".
[[noreturn]] void refuse_value(const ConfigValue& value, std::string_view found);
/// The same for what describe_node says.
[[noreturn]] void refuse_value(const ConfigValue& value);

/// Limits of a number; an open end is not itself accepted.
struct RealRange {
  double low;
  double high;
  bool low_open = false;
  bool high_open = false;
};

bool is_auto(const ConfigValue& value);
bool value_bool(const ConfigValue& value);
uint64_t value_integer(const ConfigValue& value, uint64_t low, uint64_t high);
double value_real(const ConfigValue& value, const RealRange& range);
uint64_t value_bytes(const ConfigValue& value, uint64_t low, uint64_t high);
std::string value_text(const ConfigValue& value);
/// Resolved against the source's directory, "~/" against $HOME.
std::filesystem::path value_path(const ConfigValue& value);
/// Index of the chosen name.
size_t value_choice(const ConfigValue& value, std::span<const std::string> names);

/// The value in one spelling: what 2e-5 and 0.00002, or [/a] and /a, have in common.
std::string spell_value(const ConfigValue& value);

}  // namespace overspill
