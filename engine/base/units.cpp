// Units as people write and read them. Locale-free: from_chars and fmt only. Thread-safe: no state.
#include "engine/base/units.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <numeric>
#include <utility>

#include "engine/base/error.h"

namespace overspill {
namespace {

constexpr const char* kAcceptedSizes =
    "write bytes (4096) or a number with KB, MB, GB, TB (powers of 1000) or KiB, MiB, GiB, TiB "
    "(powers of 1024), such as 512MiB or 1.5GiB";

struct Unit {
  std::string_view name;
  uint64_t bytes;
};
constexpr std::array<Unit, 10> kUnits = {{{"", 1},
                                          {"b", 1},
                                          {"kb", 1000},
                                          {"mb", 1000'000},
                                          {"gb", 1000'000'000},
                                          {"tb", 1000'000'000'000},
                                          {"kib", kKiB},
                                          {"mib", kMiB},
                                          {"gib", kGiB},
                                          {"tib", kTiB}}};

constexpr std::string_view kSpaces = " \t";

std::string_view trimmed(std::string_view text) {
  const size_t begin = text.find_first_not_of(kSpaces);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(kSpaces) - begin + 1);
}

std::string lower_case(std::string_view text) {
  std::string out(text);
  for (char& c : out) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  return out;
}

[[noreturn]] void fail_size(std::string_view text, std::string_view why) {
  fail(ErrorCode::invalid_config, "\"{}\" is not a byte size ({}); {}", text, why, kAcceptedSizes);
}

uint64_t unit_bytes(std::string_view text, std::string_view unit) {
  const std::string name = lower_case(unit);
  for (const Unit& known : kUnits) {
    if (known.name == name) return known.bytes;
  }
  fail_size(text, fmt::format("unknown unit \"{}\"", unit));
}

size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({replaced, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row[b.size()];
}

constexpr std::array<std::pair<std::string_view, uint64_t>, 4> kDurations = {
    {{"ms", 1}, {"s", 1000}, {"m", 60'000}, {"h", 3600'000}}};

}  // namespace

std::optional<std::chrono::milliseconds> parse_duration(std::string_view text) {
  uint64_t number = 0;
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || number > 1'000'000'000) return std::nullopt;
  const std::string_view unit = text.substr(static_cast<size_t>(stop - text.data()));
  for (const auto& [name, milliseconds] : kDurations) {
    if (unit == name) return std::chrono::milliseconds(number * milliseconds);
  }
  return std::nullopt;
}

std::string format_duration(std::chrono::milliseconds duration) {
  const auto count = static_cast<uint64_t>(duration.count());
  for (size_t i = kDurations.size(); i-- > 1;) {
    const auto& [name, milliseconds] = kDurations[i];
    if (count >= milliseconds && count % milliseconds == 0) {
      return fmt::format("{}{}", count / milliseconds, name);
    }
  }
  return fmt::format("{}ms", count);
}

uint64_t parse_bytes(std::string_view text) {
  const std::string_view whole = trimmed(text);
  const size_t digits = std::min(whole.find_first_not_of("0123456789."), whole.size());
  if (digits == 0) fail_size(text, "it does not start with a number");
  const char* const end = whole.data() + digits;
  const uint64_t unit = unit_bytes(text, trimmed(whole.substr(digits)));

  uint64_t integer = 0;
  const auto [stop, error] = std::from_chars(whole.data(), end, integer);
  if (stop == end && error == std::errc()) {
    if (integer > UINT64_MAX / unit) fail_size(text, "larger than 16 EiB");
    return integer * unit;
  }
  double value = 0;
  const auto [float_stop, float_error] =
      std::from_chars(whole.data(), end, value, std::chars_format::fixed);
  if (float_stop != end || float_error != std::errc()) fail_size(text, "malformed number");
  const double bytes = value * static_cast<double>(unit);
  if (!(bytes < 0x1p64)) fail_size(text, "larger than 16 EiB");
  if (unit == 1 && bytes != std::floor(bytes)) fail_size(text, "a fraction of a byte");
  return static_cast<uint64_t>(bytes);
}

std::string format_bytes(uint64_t bytes) {
  if (bytes < kKiB) return fmt::format("{} B", bytes);
  constexpr std::array<const char*, 4> kNames = {"KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes) / 1024;
  size_t unit = 0;
  // 1023.995 would print as "1024.00".
  while (value >= 1023.995 && unit + 1 < kNames.size()) {
    value /= 1024;
    ++unit;
  }
  return fmt::format("{:.2f} {}", value, kNames[unit]);
}

std::string format_rate(double bytes_per_second) {
  constexpr std::array<const char*, 5> kNames = {"B/s", "KB/s", "MB/s", "GB/s", "TB/s"};
  double value = bytes_per_second;
  size_t unit = 0;
  while (value >= 999.95 && unit + 1 < kNames.size()) {
    value /= 1000;
    ++unit;
  }
  return fmt::format("{:.1f} {}", value, kNames[unit]);
}

std::string format_seconds(double seconds) {
  if (!std::isfinite(seconds)) return fmt::format("{} s", seconds);
  if (seconds < 0) return "-" + format_seconds(-seconds);
  if (seconds < 999.5e-6) return fmt::format("{:.0f} us", seconds * 1e6);
  if (seconds < 0.99995) return fmt::format("{:.1f} ms", seconds * 1e3);
  if (seconds < 59.995) return fmt::format("{:.2f} s", seconds);
  const double whole = std::round(seconds);
  if (whole < 3600) {
    return fmt::format("{:.0f}m{:02.0f}s", std::floor(whole / 60), std::fmod(whole, 60));
  }
  const double minutes = std::round(seconds / 60);
  if (minutes >= 100 * 60) return fmt::format("{:.0f} days", minutes / (24 * 60));
  return fmt::format("{:.0f}h{:02.0f}m", std::floor(minutes / 60), std::fmod(minutes, 60));
}

std::string format_count(uint64_t count) {
  const double value = static_cast<double>(count);
  if (value < 1e3) return fmt::format("{}", count);
  if (value < 999.95e3) return fmt::format("{:.1f}K", value / 1e3);
  if (value < 999.95e6) return fmt::format("{:.1f}M", value / 1e6);
  if (value < 999.995e9) return fmt::format("{:.2f}B", value / 1e9);
  return fmt::format("{:.2f}T", value / 1e12);
}

std::string nearest_name(std::string_view name, std::span<const std::string> candidates) {
  const std::string wanted = lower_case(name);
  std::string best;
  size_t best_distance = SIZE_MAX;
  for (const std::string& candidate : candidates) {
    const size_t distance = edit_distance(wanted, lower_case(candidate));
    const size_t longer = std::max(name.size(), candidate.size());
    const size_t near = std::max<size_t>(2, longer / 3);
    if (distance > near || distance >= longer || distance >= best_distance) continue;
    best = candidate;
    best_distance = distance;
  }
  return best;
}

}  // namespace overspill
