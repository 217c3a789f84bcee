// The first to end is not always the first cause: a rank that was killed takes time to be missed,
// and a rank that misses another one ends with rank_lost before the one that hangs is killed.
#include "engine/collective/launch_verdict.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <signal.h>
#include <string.h>

#include <algorithm>

namespace overspill {
namespace {

constexpr int kInterrupted = 130;
constexpr std::string_view kCommand = "overspill: ";

bool failed(const RankOutcome& outcome) { return outcome.exit_code != 0 || outcome.signal != 0; }

bool is_consequence(const RankOutcome& outcome) {
  return outcome.killed_by_launcher ||
         (outcome.signal == 0 && outcome.last_line.starts_with("overspill: rank_lost: "));
}

/// Whether the rank ended as one does that was asked to.
bool stopped_on_request(const RankOutcome& outcome, int interrupt) {
  return outcome.exit_code == kInterrupted ||
         (interrupt != 0 && (outcome.killed_by_launcher || outcome.signal == interrupt ||
                             outcome.exit_code == 128 + interrupt));
}

std::string killed_text(const std::vector<RankOutcome>& outcomes, std::chrono::milliseconds grace) {
  std::vector<uint32_t> ranks;
  for (const RankOutcome& outcome : outcomes) {
    if (outcome.killed_by_launcher) ranks.push_back(outcome.rank);
  }
  if (ranks.empty()) return {};
  std::sort(ranks.begin(), ranks.end());
  const bool one = ranks.size() == 1;
  return fmt::format("; {} {} did not end within {:g} s and {} killed", one ? "rank" : "ranks",
                     fmt::join(ranks, ", "), static_cast<double>(grace.count()) / 1000,
                     one ? "was" : "were");
}

std::string cause_text(const RankOutcome& cause) {
  std::string text = fmt::format("overspill: rank {} (process {}) ", cause.rank, cause.process);
  if (cause.killed_by_launcher) return text + "hangs or is stopped, while others ended well";
  std::string_view line = cause.last_line;
  if (line.starts_with(kCommand)) line.remove_prefix(kCommand.size());
  if (cause.signal != 0) {
    const char* name = sigdescr_np(cause.signal);
    text += fmt::format("was killed by signal {} ({})", cause.signal, name ? name : "unknown");
    return line.empty() ? text : fmt::format("{}; its last line: {}", text, line);
  }
  text += fmt::format("ended with exit code {}", cause.exit_code);
  return line.empty() ? text : fmt::format("{}: {}", text, line);
}

}  // namespace

LaunchVerdict judge_launch(const std::vector<RankOutcome>& outcomes, int interrupt,
                           std::chrono::milliseconds grace) {
  const RankOutcome *own = nullptr, *consequence = nullptr;
  bool stopped = false;
  for (const RankOutcome& outcome : outcomes) {
    if (!failed(outcome)) continue;
    if (stopped_on_request(outcome, interrupt)) {
      stopped = true;
      continue;
    }
    const RankOutcome*& first = is_consequence(outcome) ? consequence : own;
    if (first == nullptr) first = &outcome;
  }
  // What ranks say of those that were asked to stop is no news.
  const RankOutcome* cause = own ? own : interrupt != 0 && stopped ? nullptr : consequence;
  if (cause == nullptr) return {stopped ? kInterrupted : 0, ""};
  const int code = cause->signal != 0 ? 128 + cause->signal : cause->exit_code;
  return {code, cause_text(*cause) + killed_text(outcomes, grace)};
}

}  // namespace overspill
