// Bytes, seconds and counts as people write and read them, and the nearest known name.
// Pure functions.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace overspill {

inline constexpr uint64_t kKiB = 1024, kMiB = 1024 * kKiB, kGiB = 1024 * kMiB, kTiB = 1024 * kGiB;

/// Parses "512MiB", "2GB", "1.5 GiB", "4096". Decimal units are powers of 1000, binary ones of
/// 1024.
/// Throws Error(invalid_config) naming the text and the accepted forms.
uint64_t parse_bytes(std::string_view text);

/// "1.50 GiB", "512 B".
std::string format_bytes(uint64_t bytes);
/// "1.2 GB/s" (decimal, as drives are sold).
std::string format_rate(double bytes_per_second);
/// "350 us", "12.3 ms", "4.56 s", "2m03s", "1h02m".
std::string format_seconds(double seconds);
/// Parses "500ms", "30s", "5m", "2h"; nothing for any other text.
std::optional<std::chrono::milliseconds> parse_duration(std::string_view text);
/// The shortest text that parse_duration accepts: "90s", "1m", "1500ms". Not negative.
std::string format_duration(std::chrono::milliseconds duration);
/// "1.10B", "3.2M", "512".
std::string format_count(uint64_t count);

/// The candidate with the smallest edit distance to `name`; empty when none is near
/// (distance above a third of the longer name, at least 2, or nothing in common).
std::string nearest_name(std::string_view name, std::span<const std::string> candidates);

/// Rounds up to a multiple (any positive multiple).
constexpr uint64_t round_up(uint64_t value, uint64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}
constexpr uint64_t ceil_div(uint64_t value, uint64_t divisor) {
  return (value + divisor - 1) / divisor;
}

}  // namespace overspill
