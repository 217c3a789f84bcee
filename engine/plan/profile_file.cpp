// Reading of hardware profiles. Unknown keys are refused: a misspelt rate would silently be the
// default one.
#include "engine/plan/profile_file.h"

#include <fmt/format.h>
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "engine/base/error.h"
#include "engine/base/fd.h"
#include "engine/base/units.h"
#include "engine/plan/profile_fields.h"
#include "engine/plan/profile_names.h"

namespace overspill {
namespace {

constexpr int kVersion = 2;
constexpr double kMost = 1e18;       // of any number: bytes, FLOPs a second
constexpr double kMostSeconds = 60;  // of a latency
constexpr uint64_t kSectorBytes = 4096, kMostBlockBytes = 64 * kMiB;
constexpr uint32_t kMostDepth = 1024;

/// Visits the fields of one mapping: takes the values that are there and remembers the names.
class Reader {
 public:
  Reader(const std::filesystem::path& path, const YAML::Node& mapping, std::string name)
      : path_(path), mapping_(mapping), name_(std::move(name)) {
    if (!mapping.IsMap()) refuse(mapping, "{} must be a mapping", name_);
  }

  template <class Section>
  static void read(const std::filesystem::path& path, const YAML::Node& mapping,
                   const std::string& name, Section& section, const char* besides = nullptr) {
    Reader reader(path, mapping, name);
    if (besides != nullptr) reader.names_.emplace_back(besides);
    visit(reader, section);
    reader.expect_known_keys();
  }

  void count(const char* key, uint32_t& value) {
    if (const YAML::Node node = take(key))
      value = static_cast<uint32_t>(integer(node, key, 1u << 20));
  }
  void size(const char* key, uint64_t& value) {
    if (const YAML::Node node = take(key)) value = integer(node, key, uint64_t{1} << 40);
  }
  void bytes(const char* key, uint64_t& value) {
    if (const YAML::Node node = take(key)) value = static_cast<uint64_t>(quantity(node, key));
  }
  void rate(const char* key, double& value) {
    const YAML::Node node = take(key);
    if (!node) return;
    value = quantity(node, key);
    if (value < 1) refuse(node, "{} must be at least 1", key);
  }
  void rate_or_zero(const char* key, double& value) {
    if (const YAML::Node node = take(key)) value = quantity(node, key);
  }
  void seconds(const char* key, double& value) {
    const YAML::Node node = take(key);
    if (!node) return;
    value = number(node, key);
    if (value > kMostSeconds) refuse(node, "{} must be at most {} seconds", key, kMostSeconds);
  }
  void text(const char* key, std::string& value) {
    if (const YAML::Node node = take(key)) value = node.as<std::string>("");
  }
  void boolean(const char* key, bool& value) {
    const YAML::Node node = take(key);
    if (node && !YAML::convert<bool>::decode(node, value)) {
      refuse(node, "{} must be true or false", key);
    }
  }
  void texts(const char* key, std::vector<std::string>& value) {
    for (const YAML::Node& node : sequence(key)) value.push_back(node.as<std::string>(""));
  }
  void matrix(const char* key, std::vector<std::vector<uint32_t>>& value) {
    for (const YAML::Node& row : sequence(key)) {
      if (!row.IsSequence()) refuse(row, "{} must be a list of lists", key);
      value.emplace_back();
      for (const YAML::Node& cell : row) {
        value.back().push_back(static_cast<uint32_t>(integer(cell, key, 1u << 16)));
      }
    }
    for (const auto& row : value) {
      if (row.size() != value.size()) refuse(mapping_[key], "{} must be as long as wide", key);
    }
  }
  void compute_op(const char* key, OpKind& value) { choose(key, kComputeOps, value); }
  void optimizer(const char* key, OptimizerKind& value) { choose(key, kOptimizers, value); }
  void state_format(const char* key, StateFormat& value) { choose(key, kStateFormats, value); }

  template <class Section>
  void section(const char* key, Section& value) {
    if (const YAML::Node node = take(key)) read(path_, node, key, value);
  }
  template <class Item>
  void list(const char* key, std::vector<Item>& value) {
    for (const YAML::Node& node : sequence(key)) read(path_, node, key, value.emplace_back());
  }
  void drive_settings(const char* key, std::optional<DriveSettings>& value) {
    const YAML::Node node = take(key);
    if (!node) return;
    DriveSettings settings;
    read(path_, node, key, settings);
    if (settings.block_bytes == 0 || settings.block_bytes % kSectorBytes != 0 ||
        settings.block_bytes > kMostBlockBytes) {
      refuse(node, "block_size {} must be a multiple of {} of at most {}", settings.block_bytes,
             kSectorBytes, format_bytes(kMostBlockBytes));
    }
    for (const uint32_t depth : {settings.read_depth, settings.write_depth}) {
      if (depth == 0 || depth > kMostDepth) {
        refuse(node, "read_depth and write_depth must be integers from 1 to {}", kMostDepth);
      }
    }
    value = settings;
  }

 private:
  template <class... Args>
  [[noreturn]] void refuse(const YAML::Node& node, fmt::format_string<Args...> text,
                           Args&&... args) const {
    fail(ErrorCode::invalid_config, "{}:{}: {}; `overspill bench all --profile` writes such files",
         path_.string(), std::max(node.Mark().line + 1, 1),
         fmt::format(text, std::forward<Args>(args)...));
  }

  YAML::Node take(const char* key) {
    names_.emplace_back(key);
    return mapping_[key];
  }

  YAML::Node sequence(const char* key) {
    const YAML::Node node = take(key);
    if (node && !node.IsSequence()) refuse(node, "{} must be a list", key);
    return node ? node : YAML::Node(YAML::NodeType::Sequence);
  }

  void expect_known_keys() const {
    std::vector<std::string> seen;
    for (const auto& entry : mapping_) {
      const auto key = entry.first.as<std::string>("");
      if (std::ranges::find(seen, key) != seen.end()) {
        refuse(entry.first, "{}: \"{}\" is there twice", name_, key);
      }
      seen.push_back(key);
      if (std::ranges::find(names_, key) != names_.end()) continue;
      const std::string nearest = nearest_name(key, names_);
      refuse(entry.first, "{}: unknown key \"{}\"{}", name_, key,
             nearest.empty() ? "" : fmt::format(" (did you mean \"{}\"?)", nearest));
    }
  }

  double number(const YAML::Node& node, const char* key) const {
    const double value = node.as<double>(NAN);
    if (!std::isfinite(value) || value < 0 || value > kMost) {
      refuse(node, "{} must be a number from 0 to {:g}", key, kMost);
    }
    return value;
  }

  /// A number, or one with a unit of bytes: 5.5e10, 55GB.
  double quantity(const YAML::Node& node, const char* key) const {
    double value = 0;
    if (node.IsScalar() && !YAML::convert<double>::decode(node, value)) {
      try {
        return static_cast<double>(parse_bytes(node.Scalar()));
      } catch (const Error&) {
        refuse(node, "{} must be a number, or one with a unit such as 55GB", key);
      }
    }
    return number(node, key);
  }

  uint64_t integer(const YAML::Node& node, const char* key, uint64_t most) const {
    const auto value = node.as<uint64_t>(0);
    if (value == 0 || value > most) {
      refuse(node, "{} must be an integer from 1 to {}", key, most);
    }
    return value;
  }

  template <class Enum, size_t count>
  void choose(const char* key, const std::array<Named<Enum>, count>& names, Enum& value) {
    const YAML::Node node = take(key);
    if (!node) return refuse(mapping_, "{} needs the key \"{}\"", name_, key);
    for (const auto& one : names) {
      if (node.as<std::string>("") == one.name) return void(value = one.value);
    }
    std::string accepted;
    for (const auto& one : names)
      accepted += (accepted.empty() ? "" : ", ") + std::string(one.name);
    refuse(node, "{} must be one of {}", key, accepted);
  }

  const std::filesystem::path& path_;
  const YAML::Node mapping_;
  const std::string name_;
  std::vector<std::string> names_;
};

/// Of two flows at once, where only each alone is known: half, as of a resource that takes turns.
void fill_in_shared_rates(const YAML::Node& root, HardwareProfile& profile) {
  const auto given = [&](const char* section, const char* key) {
    return root[section].IsDefined() && root[section][key].IsDefined();
  };
  const auto half = [&](const char* section, const char* alone, const char* both, double from,
                        double& to) {
    if (given(section, alone) && !given(section, both)) to = from / 2;
  };
  DrivesProfile& d = profile.drives;
  LinkProfile& l = profile.link;
  half("drives", "read", "mixed_read", d.read, d.mixed_read);
  half("drives", "write", "mixed_write", d.write, d.mixed_write);
  half("link", "h2d", "both_h2d", l.h2d, l.both_h2d);
  half("link", "d2h", "both_d2h", l.d2h, l.both_d2h);
}

void check_device(const std::filesystem::path& path, const DeviceProfile& device) {
  const bool knows_compute =
      !device.compute.empty() || device.peak_flops != DeviceProfile().peak_flops;
  if (!device.accelerator || (device.memory > 0 && knows_compute)) return;
  fail(ErrorCode::invalid_config,
       "{}: device: an accelerator needs memory, and peak_flops or compute; add them",
       path.string());
}

}  // namespace

HardwareProfile load_profile(const std::filesystem::path& path) {
  HardwareProfile profile;
  YAML::Node root;
  try {
    root = YAML::Load(read_text_file(path));
  } catch (const YAML::Exception& error) {
    fail(ErrorCode::invalid_config,
         "{}:{}: not valid YAML: {}; `overspill bench all --profile` writes such files",
         path.string(), error.mark.line + 1, error.msg);
  }
  if (root.IsMap() && root["version"].as<int>(0) != kVersion) {
    fail(ErrorCode::invalid_config,
         "{}:1: a hardware profile of version {} is needed (version: {}); write the file anew with "
         "`overspill bench all --profile`",
         path.string(), kVersion, kVersion);
  }
  Reader::read(path, root, "a hardware profile", profile, "version");
  fill_in_shared_rates(root, profile);
  check_device(path, profile.device);
  return profile;
}

}  // namespace overspill
