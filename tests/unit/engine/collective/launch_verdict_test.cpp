// The first cause among the ends of several ranks.
#include "engine/collective/launch_verdict.h"

#include <gtest/gtest.h>
#include <signal.h>

namespace overspill {
namespace {

const std::string kLost =
    "overspill: rank_lost: rank 2 (host h, process 12): its connection closed";

RankOutcome exited(uint32_t rank, int code, std::string last_line = {}) {
  return {.rank = rank,
          .process = static_cast<int>(10 + rank),
          .exit_code = code,
          .last_line = std::move(last_line)};
}

RankOutcome killed(uint32_t rank, int signal, bool by_launcher = false) {
  return {.rank = rank,
          .process = static_cast<int>(10 + rank),
          .signal = signal,
          .killed_by_launcher = by_launcher};
}

LaunchVerdict judge(const std::vector<RankOutcome>& outcomes, int interrupt = 0) {
  return judge_launch(outcomes, interrupt, std::chrono::seconds(10));
}

TEST(LaunchVerdict, SaysNothingOfSuccess) {
  const LaunchVerdict verdict = judge({exited(1, 0), exited(0, 0)});
  EXPECT_EQ(verdict.exit_code, 0);
  EXPECT_EQ(verdict.text, "");
}

TEST(LaunchVerdict, ASignalGoesBeforeItsConsequences) {
  const LaunchVerdict verdict =
      judge({exited(0, 1, kLost), killed(2, SIGKILL), exited(1, 1, kLost)});
  EXPECT_EQ(verdict.exit_code, 137);
  EXPECT_EQ(verdict.text, "overspill: rank 2 (process 12) was killed by signal 9 (Killed)");
}

TEST(LaunchVerdict, AnErrorOfItsOwnGoesBeforeItsConsequences) {
  const LaunchVerdict verdict =
      judge({exited(0, 1, kLost), exited(2, 2, "overspill: invalid_config: lr: 1"),
             killed(1, SIGKILL, true)});
  EXPECT_EQ(verdict.exit_code, 2);
  EXPECT_EQ(
      verdict.text,
      "overspill: rank 2 (process 12) ended with exit code 2: invalid_config: lr: 1; rank 1 did "
      "not end within 10 s and was killed");
}

TEST(LaunchVerdict, AStoppedRankIsNamedByThoseWhoMissIt) {
  const LaunchVerdict verdict =
      judge({exited(0, 1, kLost), exited(1, 1, kLost), killed(2, SIGKILL, true)});
  EXPECT_EQ(verdict.exit_code, 1);
  EXPECT_EQ(verdict.text,
            "overspill: rank 0 (process 10) ended with exit code 1: rank_lost: rank 2 (host h, "
            "process 12): its connection closed; rank 2 did not end within 10 s and was killed");
}

TEST(LaunchVerdict, ARankThatHangsAtTheEndIsTheCause) {
  const LaunchVerdict verdict = judge({exited(1, 0), exited(2, 0), killed(0, SIGKILL, true)});
  EXPECT_EQ(verdict.exit_code, 137);
  EXPECT_EQ(verdict.text,
            "overspill: rank 0 (process 10) hangs or is stopped, while others ended well; rank 0 "
            "did not end within 10 s and was killed");
}

TEST(LaunchVerdict, KilledRanksAreListedInOrder) {
  const LaunchVerdict verdict =
      judge({exited(1, 2, "overspill: io: x"), killed(2, SIGKILL, true), killed(0, SIGKILL, true)});
  EXPECT_TRUE(verdict.text.ends_with("; ranks 0, 2 did not end within 10 s and were killed"))
      << verdict.text;
}

TEST(LaunchVerdict, InterruptedRunsEndWith130) {
  EXPECT_EQ(judge({exited(0, 130), exited(1, 130)}).exit_code, 130);
  EXPECT_EQ(judge({exited(0, 130), killed(1, SIGTERM)}, SIGTERM).exit_code, 130);
  EXPECT_EQ(judge({exited(0, 130), exited(1, 1, kLost)}, SIGINT).exit_code, 130);
  EXPECT_EQ(judge({killed(0, SIGKILL, true), killed(1, SIGKILL, true)}, SIGINT).exit_code, 130);
  EXPECT_EQ(judge({exited(0, 130), exited(1, 1, "overspill: io: x")}, SIGINT).exit_code, 1);
}

}  // namespace
}  // namespace overspill
