// Reading and writing of hardware profiles. Unknown keys are refused: a misspelt rate would
// silently be the default one.
#include "engine/plan/profile_file.h"

#include <fmt/format.h>
#include <yaml-cpp/yaml.h>

#include <cmath>
#include <vector>

#include "engine/base/error.h"
#include "engine/base/fd.h"
#include "engine/base/units.h"

namespace overspill {
namespace {

constexpr int kVersion = 1;
constexpr uint64_t kSectorBytes = 4096, kMostBlockBytes = 64 * kMiB;
constexpr uint32_t kMostDepth = 1024;

/// The file under way, for messages.
struct Reader {
  const std::filesystem::path& path;

  template <class... Args>
  [[noreturn]] void refuse(const YAML::Node& node, fmt::format_string<Args...> text,
                           Args&&... args) const {
    fail(ErrorCode::invalid_config,
         "{}:{}: {}; write the file anew with `overspill bench nvme "
         "--profile`",
         path.string(), node.Mark().line + 1, fmt::format(text, std::forward<Args>(args)...));
  }

  void expect_keys(const YAML::Node& mapping, const char* name,
                   const std::vector<std::string>& known) const {
    if (!mapping.IsMap()) refuse(mapping, "{} must be a mapping", name);
    for (const auto& entry : mapping) {
      const std::string key = entry.first.as<std::string>("");
      bool found = false;
      for (const std::string& candidate : known) found |= candidate == key;
      if (found) continue;
      const std::string nearest = nearest_name(key, known);
      refuse(entry.first, "{}: unknown key \"{}\"{}", name, key,
             nearest.empty() ? "" : fmt::format(" (did you mean \"{}\"?)", nearest));
    }
  }

  double number(const YAML::Node& mapping, const char* key, double low) const {
    const YAML::Node node = mapping[key];
    const double value = node ? node.as<double>(NAN) : NAN;
    if (!std::isfinite(value) || value < low) {
      refuse(node ? node : mapping, "{} must be a number of at least {}", key, low);
    }
    return value;
  }

  uint64_t integer(const YAML::Node& mapping, const char* key, uint64_t most) const {
    const YAML::Node node = mapping[key];
    const uint64_t value = node ? node.as<uint64_t>(0) : 0;
    if (value == 0 || value > most) {
      refuse(node ? node : mapping, "{} must be an integer from 1 to {}", key, most);
    }
    return value;
  }
};

void read_drives(const Reader& reader, const YAML::Node& node, HardwareProfile& profile) {
  reader.expect_keys(node, "nvme", {"block_size", "read_depth", "write_depth"});
  DriveSettings settings;
  settings.block_bytes = reader.integer(node, "block_size", kMostBlockBytes);
  if (settings.block_bytes % kSectorBytes != 0) {
    reader.refuse(node["block_size"], "block_size {} is no multiple of {}", settings.block_bytes,
                  kSectorBytes);
  }
  settings.read_depth = static_cast<uint32_t>(reader.integer(node, "read_depth", kMostDepth));
  settings.write_depth = static_cast<uint32_t>(reader.integer(node, "write_depth", kMostDepth));
  profile.drives = settings;
}

void read_rates(const Reader& reader, const YAML::Node& node, HardwareProfile& profile) {
  std::vector<std::string> names;
  for (size_t kind = 0; kind < kOpKinds; ++kind)
    names.push_back(op_name(static_cast<OpKind>(kind)));
  reader.expect_keys(node, "rates", names);
  for (size_t kind = 0; kind < kOpKinds; ++kind) {
    const YAML::Node rate = node[names[kind]];
    if (!rate) continue;
    reader.expect_keys(rate, names[kind].c_str(), {"work_per_second", "latency_seconds"});
    profile.rates[kind] = {reader.number(rate, "work_per_second", 1e-3),
                           reader.number(rate, "latency_seconds", 0)};
  }
}

}  // namespace

HardwareProfile load_profile(const std::filesystem::path& path) {
  const Reader reader{path};
  HardwareProfile profile = default_profile();
  YAML::Node root;
  try {
    root = YAML::Load(read_text_file(path));
  } catch (const YAML::Exception& error) {
    fail(ErrorCode::invalid_config,
         "{}:{}: not valid YAML: {}; write the file anew with "
         "`overspill bench nvme --profile`",
         path.string(), error.mark.line + 1, error.msg);
  }
  reader.expect_keys(root, "a hardware profile", {"version", "nvme", "rates"});
  if (root["version"].as<int>(0) != kVersion) {
    reader.refuse(root, "version must be {}", kVersion);
  }
  if (const YAML::Node nvme = root["nvme"]) read_drives(reader, nvme, profile);
  if (const YAML::Node rates = root["rates"]) read_rates(reader, rates, profile);
  return profile;
}

void save_profile(const std::filesystem::path& path, const HardwareProfile& profile,
                  std::span<const OpKind> kinds, const std::string& origin) {
  std::string text = fmt::format(
      "# {}\n# Read by `overspill train` where offload.hardware_profile names this file.\n"
      "version: {}\n",
      origin, kVersion);
  if (const auto& drives = profile.drives) {
    text += fmt::format("nvme:\n  block_size: {}\n  read_depth: {}\n  write_depth: {}\n",
                        drives->block_bytes, drives->read_depth, drives->write_depth);
  }
  if (!kinds.empty()) text += "rates:  # work is bytes, FLOPs or parameters\n";
  for (const OpKind kind : kinds) {
    const HardwareProfile::Rate& rate = profile[kind];
    text += fmt::format("  {}: {{work_per_second: {:.6g}, latency_seconds: {:.6g}}}\n",
                        op_name(kind), rate.work_per_second, rate.latency_seconds);
  }
  write_text_file(path, text);
}

}  // namespace overspill
