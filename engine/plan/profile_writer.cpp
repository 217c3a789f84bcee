// Writing of hardware profiles: what differs from the defaults, rounded to six digits.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "engine/base/fd.h"
#include "engine/plan/profile_fields.h"
#include "engine/plan/profile_file.h"
#include "engine/plan/profile_names.h"

namespace overspill {
namespace {

/// Collects "key: value" lines of one mapping. Lists of mappings have one line per item.
class Writer {
 public:
  template <class Section>
  static std::vector<std::string> write(const Section& section, const Section& usual) {
    // visit() takes sections to be filled; a writer only looks.
    Section value = section, plain = usual;
    Writer defaults, writer;
    visit(defaults, plain);
    writer.usual_ = std::move(defaults.lines_);
    visit(writer, value);
    return std::move(writer.lines_);
  }

  void count(const char* key, uint32_t value) { scalar(key, fmt::format("{}", value)); }
  void size(const char* key, uint64_t value) { scalar(key, fmt::format("{}", value)); }
  void bytes(const char* key, uint64_t value) { scalar(key, fmt::format("{}", value)); }
  void rate(const char* key, double value) { scalar(key, fmt::format("{:.6g}", value)); }
  void rate_or_zero(const char* key, double value) { rate(key, value); }
  void seconds(const char* key, double value) { rate(key, value); }
  void text(const char* key, const std::string& value) { scalar(key, quoted(value)); }
  void boolean(const char* key, bool value) { scalar(key, value ? "true" : "false"); }
  void texts(const char* key, const std::vector<std::string>& values) {
    if (!values.empty()) lines_.push_back(fmt::format("{}:", key));
    for (const std::string& value : values) lines_.push_back("  - " + quoted(value));
  }
  void matrix(const char* key, const std::vector<std::vector<uint32_t>>& rows) {
    std::string text;
    for (const auto& row : rows) {
      text += fmt::format("{}[{}]", text.empty() ? "" : ", ", fmt::join(row, ", "));
    }
    if (!rows.empty()) lines_.push_back(fmt::format("{}: [{}]", key, text));
  }
  void compute_op(const char* key, OpKind value) { named(key, kComputeOps, value); }
  void optimizer(const char* key, OptimizerKind value) { named(key, kOptimizers, value); }
  void state_format(const char* key, StateFormat value) { named(key, kStateFormats, value); }

  template <class Section>
  void section(const char* key, const Section& value) {
    const std::vector<std::string> lines = write(value, Section{});
    if (!lines.empty()) lines_.push_back(fmt::format("{}:", key));
    for (const std::string& line : lines) lines_.push_back("  " + line);
  }
  template <class Item>
  void list(const char* key, const std::vector<Item>& items) {
    if (!items.empty()) lines_.push_back(fmt::format("{}:", key));
    for (const Item& item : items) lines_.push_back("  - " + flow(item));
  }
  void drive_settings(const char* key, const std::optional<DriveSettings>& value) {
    if (value) lines_.push_back(fmt::format("{}: {}", key, flow(*value)));
  }

 private:
  template <class Item>
  static std::string flow(Item item) {
    Writer writer;
    visit(writer, item);
    return fmt::format("{{{}}}", fmt::join(writer.lines_, ", "));
  }

  static std::string quoted(const std::string& text) {
    std::string result = "\"";
    for (const char c : text) {
      if (c == '"' || c == '\\') result += '\\';
      result += c;
    }
    return result + "\"";
  }

  template <class Enum, size_t count>
  void named(const char* key, const std::array<Named<Enum>, count>& names, Enum value) {
    for (const auto& one : names) {
      if (one.value == value) lines_.push_back(fmt::format("{}: {}", key, one.name));
    }
  }

  void scalar(const char* key, const std::string& value) {
    std::string line = fmt::format("{}: {}", key, value);
    if (std::ranges::find(usual_, line) == usual_.end()) lines_.push_back(std::move(line));
  }

  std::vector<std::string> lines_;
  std::vector<std::string> usual_;  ///< the defaults' lines, to be left out
};

}  // namespace

std::string profile_text(const HardwareProfile& profile, const std::string& comment) {
  std::string text;
  for (size_t begin = 0; begin < comment.size();) {
    const size_t end = std::min(comment.find('\n', begin), comment.size());
    text += "# " + comment.substr(begin, end - begin) + "\n";
    begin = end + 1;
  }
  text += "version: 2\n";
  for (const std::string& line : Writer::write(profile, HardwareProfile{})) text += line + "\n";
  return text;
}

void save_profile(const std::filesystem::path& path, const HardwareProfile& profile,
                  const std::string& comment) {
  write_text_file(path, profile_text(profile, comment));
}

}  // namespace overspill
