// Slurm's compressed lists, as its manual pages (scontrol, srun) describe them.
#include "engine/collective/slurm_environment.h"

#include <algorithm>
#include <charconv>

namespace overspill {
namespace {

/// The number that `text` begins with, which is cut off.
std::optional<uint32_t> take_number(std::string_view& text) {
  uint32_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc()) return std::nullopt;
  text.remove_prefix(static_cast<size_t>(end - text.data()));
  return value;
}

bool take(std::string_view& text, std::string_view word) {
  if (!text.starts_with(word)) return false;
  text.remove_prefix(word.size());
  return true;
}

}  // namespace

std::string first_slurm_host(std::string_view list) {
  std::string host;
  while (!list.empty() && list.front() != ',') {
    if (!take(list, "[")) {
      host += list.front();
      list.remove_prefix(1);
      continue;
    }
    const size_t end = list.find(']');
    if (end == std::string_view::npos) return {};
    // Leading zeros are part of the name.
    host += list.substr(0, std::min(list.find_first_of("-,]"), end));
    list.remove_prefix(end + 1);
  }
  return host;
}

std::optional<uint32_t> slurm_count_at(std::string_view list, uint32_t index) {
  for (uint64_t nodes = 0; !list.empty();) {
    const auto count = take_number(list);
    if (!count) return std::nullopt;
    uint32_t times = 1;
    if (take(list, "(x")) {
      const auto repeated = take_number(list);
      if (!repeated || !take(list, ")")) return std::nullopt;
      times = *repeated;
    }
    nodes += times;
    if (index < nodes) return count;
    if (!take(list, ",")) return std::nullopt;
  }
  return std::nullopt;
}

}  // namespace overspill
