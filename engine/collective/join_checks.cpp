// Compares what ranks say of themselves when they join.
#include "engine/collective/join_checks.h"

#include <algorithm>
#include <sstream>

namespace overspill {
namespace {

/// The first line in which the two differ, as each has it; "nothing" past an end.
std::pair<std::string, std::string> first_difference(const std::string& ours,
                                                     const std::string& theirs) {
  std::istringstream left(ours), right(theirs);
  for (;;) {
    std::string a, b;
    const bool has_a = !!std::getline(left, a), has_b = !!std::getline(right, b);
    if (has_a && has_b && a == b) continue;
    // Equal lines and different texts: only the last line's end differs.
    if (!has_a && !has_b) return {"no line end", "a line end"};
    return {has_a ? "\"" + a + "\"" : "nothing", has_b ? "\"" + b + "\"" : "nothing"};
  }
}

std::string number_list(std::span<const uint32_t> numbers) {
  constexpr size_t kNamed = 16;
  std::string text;
  const size_t named = numbers.size() > kNamed + 1 ? kNamed : numbers.size();
  for (size_t i = 0; i < named; ++i) {
    if (i > 0) text += i + 1 == numbers.size() ? " and " : ", ";
    text += std::to_string(numbers[i]);
  }
  if (named < numbers.size()) text += fmt::format(" and {} more", numbers.size() - named);
  return text;
}

}  // namespace

std::optional<Failure> misfit(const RankHello& ours, const RankHello& theirs) {
  const std::string who = rank_text(theirs.rank, theirs.host, theirs.process);
  const std::string zero = rank_text(ours.rank, ours.host, ours.process);
  const auto lost = [](std::string what) { return Failure{ErrorCode::rank_lost, std::move(what)}; };
  if (theirs.version != ours.version) {
    return lost(
        fmt::format("{} runs overspill {}, {} runs overspill {}; install the same version "
                    "on all hosts",
                    who, theirs.version, zero, ours.version));
  }
  if (theirs.ranks != ours.ranks) {
    return lost(
        fmt::format("{} was started as one of {} ranks, {} as one of {}; start all with the "
                    "same number (WORLD_SIZE)",
                    who, theirs.ranks, zero, ours.ranks));
  }
  if (theirs.rank >= ours.ranks) {
    return lost(
        fmt::format("{} does not exist in a run of {} ranks; RANK counts from 0", who, ours.ranks));
  }
  if (theirs.config == ours.config) return std::nullopt;
  const auto [line, other] = first_difference(ours.config, theirs.config);
  return Failure{ErrorCode::invalid_config,
                 fmt::format("{} has another configuration than {}: {} instead of {}; start all "
                             "ranks with the same configuration",
                             who, zero, other, line)};
}

Failure missing_ranks(std::span<const uint32_t> missing, uint32_t ranks,
                      std::chrono::milliseconds timeout, const std::string& place) {
  const bool one = missing.size() == 1;
  return {
      ErrorCode::rank_lost,
      fmt::format("{} {} of {} {} not joined within {} at {}; see the output of {}, and whether "
                  "that address can be reached from there",
                  one ? "rank" : "ranks", number_list(missing), ranks, one ? "has" : "have",
                  seconds_text(timeout), place, one ? "that rank" : "those ranks")};
}

}  // namespace overspill
