// Walks a DeepSpeed configuration by the table of its keys, and merges what comes of it under the
// values of the YAML file.
#include "engine/train/config_deepspeed.h"

#include <algorithm>
#include <sstream>

#include "engine/base/error.h"
#include "engine/base/fd.h"
#include "engine/base/log.h"
#include "engine/base/units.h"
#include "engine/model/strict_json.h"
#include "engine/train/config_deepspeed_keys.h"
#include "engine/train/config_json.h"
#include "engine/train/config_keys.h"

namespace overspill {
namespace {

using nlohmann::ordered_json;

std::string_view section_of(std::string_view path) {
  const size_t dot = path.rfind('.');
  return dot == std::string_view::npos ? std::string_view() : path.substr(0, dot);
}

const DeepSpeedKey* find_deepspeed_key(std::string_view path) {
  for (const DeepSpeedKey& key : deepspeed_keys()) {
    if (key.path == path) return &key;
  }
  return nullptr;
}

bool is_deepspeed_section(const std::string& path) {
  return std::ranges::any_of(
      deepspeed_keys(), [&](const DeepSpeedKey& key) { return key.path.starts_with(path + "."); });
}

std::vector<std::string> words_of(std::string_view text, char separator) {
  std::vector<std::string> words;
  std::istringstream stream{std::string(text)};
  for (std::string word; std::getline(stream, word, separator);) {
    if (!word.empty()) words.push_back(word);
  }
  return words;
}

/// Names of a section, of every section for nullptr; subsections count.
std::vector<std::string> names_in(const std::string* section) {
  std::vector<std::string> names;
  for (const DeepSpeedKey& key : deepspeed_keys()) {
    for (std::string_view path = key.path; !path.empty(); path = section_of(path)) {
      if (!section || section_of(path) == *section) names.emplace_back(leaf_name(path));
    }
  }
  return names;
}

/// The full path of a name in whatever section has it first.
std::string path_of(const std::string& name) {
  for (const DeepSpeedKey& key : deepspeed_keys()) {
    for (std::string_view path = key.path; !path.empty(); path = section_of(path)) {
      if (leaf_name(path) == name) return std::string(path);
    }
  }
  return "";
}

[[noreturn]] void refuse_unknown(const std::string& where, const std::string& section,
                                 const std::string& name) {
  const std::string path = section.empty() ? name : section + "." + name;
  const std::string prefix =
      fmt::format("{}: {}: found a key that DeepSpeed does not have", where, path);
  if (const std::string other = path_of(name); !other.empty()) {
    fail(ErrorCode::invalid_config, "{}; it belongs to {}: write it as {}", prefix,
         section_of(other).empty() ? "the top level" : section_of(other), other);
  }
  std::string near = nearest_name(name, names_in(&section));
  if (!near.empty() && !section.empty()) near = section + "." + near;
  if (near.empty()) near = path_of(nearest_name(name, names_in(nullptr)));
  if (near.empty()) {
    fail(ErrorCode::invalid_config, "{}; remove it, or see docs/deepspeed.md for all keys", prefix);
  }
  fail(ErrorCode::invalid_config, "{}; did you mean \"{}\"?", prefix, near);
}

bool is_auto(const ordered_json& value) { return value.is_null() || value == "auto"; }

/// Whether a value of a refused key asks for nothing.
bool is_harmless(const DeepSpeedKey& key, const ordered_json& value) {
  const ordered_json* asked = &value;
  if (!key.gate.empty() && value.is_object()) {
    const auto gate = value.find(key.gate);
    if (gate == value.end()) return true;
    asked = &*gate;
  }
  if (is_auto(*asked)) return true;
  const std::vector<std::string> harmless = words_of(key.harmless, '|');
  return std::ranges::any_of(
      harmless, [&](const std::string& text) { return ordered_json::parse(text) == *asked; });
}

class Walker {
 public:
  explicit Walker(const std::filesystem::path& path)
      : file_(path.string()),
        name_(path.filename().string()),
        directory_(path.parent_path()),
        json_(parse_located_json(read_text_file(path), file_)) {}

  DeepSpeedConfig walk() {
    walk_section(json_.root, "");
    check_warmup();
    return std::move(result_);
  }

 private:
  std::string where(const std::string& path) const {
    return fmt::format("{}:{}", file_, json_.lines.at(path));
  }

  template <class... Args>
  void report(const std::string& path, fmt::format_string<Args...> text, Args&&... args) {
    result_.report.push_back(
        fmt::format("{}: {}: {}", name_, path, fmt::format(text, std::forward<Args>(args)...)));
  }

  void walk_section(const ordered_json& section, const std::string& prefix) {
    for (const auto& [name, value] : section.items()) {
      const std::string path = prefix.empty() ? name : prefix + "." + name;
      const DeepSpeedKey* const key =
          name.find('.') == std::string::npos ? find_deepspeed_key(path) : nullptr;
      if (key) {
        walk_entry({key, value, section, where(path)});
      } else if (name.find('.') == std::string::npos && is_deepspeed_section(path)) {
        walk_subsection(value, path);
      } else {
        refuse_unknown(where(path), prefix, name);
      }
    }
  }

  void walk_subsection(const ordered_json& value, const std::string& path) {
    if (is_auto(value)) {
      report(path, "no value, so ours are meant");
    } else if (value.is_object()) {
      walk_section(value, path);
    } else {
      fail(ErrorCode::invalid_config,
           "{}: {}: found {}; accepted: an object of keys, as docs/deepspeed.md lists", where(path),
           path, brief(value));
    }
  }

  static std::string brief(const ordered_json& value) { return brief_json(nlohmann::json(value)); }

  void walk_entry(const DeepSpeedEntry& entry) {
    const DeepSpeedKey& key = *entry.key;
    const std::string path(key.path);
    if (!key.members.empty()) check_members(entry);
    if (key.action == DeepSpeedAction::refused) {
      if (!is_harmless(key, entry.value)) refuse_entry(entry, key.text);
      report(path, "not needed: {} asks for nothing",
             entry.value.is_object() ? "what is switched off" : brief(entry.value));
    } else if (key.action == DeepSpeedAction::not_needed) {
      report(path, "not needed: {}", key.text);
    } else if (is_auto(entry.value)) {
      report(path, "auto -> {} as in the YAML file, or its default", key.ours);
    } else {
      apply(entry);
    }
  }

  void check_members(const DeepSpeedEntry& entry) const {
    if (entry.key->members == "*" || !entry.value.is_object()) return;
    const std::vector<std::string> members = words_of(entry.key->members, ' ');
    for (const auto& item : entry.value.items()) {
      const std::string& name = item.key();
      if (std::ranges::find(members, name) != members.end()) continue;
      const std::string path = fmt::format("{}.{}", entry.key->path, name);
      const std::string near = nearest_name(name, members);
      fail(ErrorCode::invalid_config, "{}: {}: found a key that DeepSpeed does not have; {}",
           where(path), path,
           near.empty() ? fmt::format("accepted: {}", fmt::join(members, ", "))
                        : fmt::format("did you mean \"{}.{}\"?", entry.key->path, near));
    }
  }

  void apply(const DeepSpeedEntry& entry) {
    const std::string path(entry.key->path);
    const std::vector<DeepSpeedSetting> settings = entry.key->convert(entry);
    if (settings.empty()) {
      report(path, "{}: not needed: {}", brief(entry.value), entry.key->text);
      return;
    }
    for (const DeepSpeedSetting& setting : settings) {
      const ConfigKey* const ours = find_key(train_keys(), setting.key);
      CHECK(ours);
      const ConfigValue value = {
          ours, path, setting.node, entry.where, {entry.where, false, directory_, true}};
      const std::string spelt = spell_value(value);  // refuses what is out of range
      report(path, "{} -> {}: {}", brief(entry.value), setting.key, spelt);
      add(value);
    }
  }

  /// DeepSpeed has several keys for some of ours; they must agree. Paths of drives add up.
  void add(const ConfigValue& value) {
    const auto same = [&](const ConfigValue& other) { return other.key == value.key; };
    const auto found = std::ranges::find_if(result_.values, same);
    if (found == result_.values.end()) {
      result_.values.push_back(value);
      return;
    }
    if (spell_value(*found) == spell_value(value)) return;
    if (value.key->name == "offload.nvme_paths") {
      found->node.push_back(value.node[0]);
      return;
    }
    fail(ErrorCode::invalid_config,
         "{}: {}: found {}, but {} says {} at {}, and both are our {}; make them the same, or "
         "remove one",
         value.where, value.path, spell_value(value), found->path, spell_value(*found),
         found->where, value.key->name);
  }

  /// DeepSpeed's warm-up is logarithmic where nothing is said, which we have not.
  void check_warmup() {
    const auto scheduler = json_.root.find("scheduler");
    if (scheduler == json_.root.end() || !scheduler->is_object()) return;
    const auto params = scheduler->find("params");
    if (params != scheduler->end() && params->is_object() && params->contains("warmup_type"))
      return;
    report("scheduler.params.warmup_type", "absent: the warm-up is linear, not DeepSpeed's log");
  }

  const std::string file_, name_;
  const std::filesystem::path directory_;
  const LocatedJson json_;
  DeepSpeedConfig result_;
};

void merge(const ConfigValue& value, const std::string& file, ConfigValues& values) {
  const std::string& name = value.key->name;
  const auto [found, fresh] = values.emplace(name, value);
  if (fresh) return;
  if (found->second.source.is_override) {
    log_info("{}: {}: replaced by {}", file, value.path, found->second.where);
    return;
  }
  const std::string theirs = spell_value(value), ours = spell_value(found->second);
  if (theirs == ours) return;
  fail(ErrorCode::invalid_config,
       "{}: {}: found {}, but {} is {} at {}; make them the same, or write \"auto\" here to mean "
       "the YAML file's",
       value.where, value.path, theirs, name, ours, found->second.where);
}

std::string table_row(const DeepSpeedKey& key) {
  std::string what;
  if (key.action == DeepSpeedAction::applied) {
    what = fmt::format("`{}`{}{}", key.ours, key.text.empty() ? "" : ": ", key.text);
  } else if (key.action == DeepSpeedAction::not_needed) {
    what = fmt::format("not needed: {}", key.text);
  } else {
    std::string unless;
    for (const std::string& text : words_of(key.harmless, '|')) {
      unless += fmt::format("{}`{}{}`", unless.empty() ? " unless " : " or ",
                            key.gate.empty() ? "" : fmt::format("{}: ", key.gate), text);
    }
    what = fmt::format("refused{}: {}", unless, key.text);
  }
  return fmt::format("| `{}` | {} |\n", key.path, what);
}

}  // namespace

void refuse_entry(const DeepSpeedEntry& entry, std::string_view cure) {
  fail(ErrorCode::invalid_config, "{}: {}: found {}; {}", entry.where, entry.key->path,
       brief_json(nlohmann::json(entry.value)), cure);
}

DeepSpeedConfig read_deepspeed_config(const std::filesystem::path& path) {
  return Walker(path).walk();
}

void put_deepspeed(ConfigValues& values) {
  const auto given = values.find("deepspeed");
  if (given == values.end()) return;
  const std::filesystem::path path = value_path(given->second);
  if (!std::filesystem::exists(path)) {
    refuse_value(given->second, fmt::format("{}, which does not exist", path.string()));
  }
  const DeepSpeedConfig config = read_deepspeed_config(path);
  for (const std::string& line : config.report) log_info("{}", line);
  for (const ConfigValue& value : config.values) merge(value, path.filename().string(), values);
}

std::string describe_deepspeed_keys() {
  std::string text = "| key | what becomes of it |\n|---|---|\n";
  for (const DeepSpeedKey& key : deepspeed_keys()) text += table_row(key);
  return text;
}

}  // namespace overspill
