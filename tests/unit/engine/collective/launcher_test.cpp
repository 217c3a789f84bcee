// The launcher over shell commands: prefixes, environment, exit codes, signals, its own death.
#include "engine/collective/launcher.h"

#include <gtest/gtest.h>
#include <sys/prctl.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>

#include "engine/base/error.h"
#include "tests/fault/launch_fixture.h"

namespace overspill {
namespace {

namespace fs = std::filesystem;
using test::contains;
using test::ForkedRank;
using test::milliseconds;
using Clock = std::chrono::steady_clock;

class Launcher : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = fs::temp_directory_path() / "overspill-test-XXXXXX";
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    root_ = name;
  }
  void TearDown() override { fs::remove_all(root_); }

  /// Ranks that run the shell script; their output lies in out() and err().
  ForkedRank start(uint32_t ranks, const std::string& script, int grace_ms = 5000) {
    return start(
        {.ranks = ranks, .command = {"/bin/sh", "-c", script}, .grace = milliseconds(grace_ms)});
  }
  ForkedRank start(const LaunchOptions& options) {
    return ForkedRank([=, this] {
      const int to_out = open(path("out").c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
      const int to_err = open(path("err").c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
      // As from a terminal: in another session than the test, who adopts what is left of it.
      setsid();
      if (chdir(root_.c_str()) != 0 || dup2(to_out, 1) < 0 || dup2(to_err, 2) < 0) _exit(99);
      return std::to_string(launch_ranks(options));
    });
  }
  /// The launcher's return value, or its error.
  std::string launch(uint32_t ranks, const std::string& script, int grace_ms = 5000) {
    return start(ranks, script, grace_ms).wait(milliseconds(20000)).text;
  }

  std::string path(const std::string& name) const { return root_ / name; }
  std::string text(const std::string& name) const {
    std::ifstream stream(path(name));
    return {std::istreambuf_iterator<char>(stream), {}};
  }
  std::string out() const { return text("out"); }
  std::string err() const { return text("err"); }
  /// The line of standard error that names the first cause.
  std::string verdict() const {
    std::istringstream lines(err());
    for (std::string line; std::getline(lines, line);) {
      if (line.starts_with("overspill: ")) return line;
    }
    return {};
  }
  /// Waits for all files that the ranks make.
  bool wait_for_files(std::initializer_list<const char*> names) const {
    for (int i = 0; i < 4000; ++i) {
      const bool all = std::all_of(names.begin(), names.end(),
                                   [&](const char* name) { return fs::exists(path(name)); });
      if (all) return true;
      std::this_thread::sleep_for(milliseconds(2));
    }
    return false;
  }

  fs::path root_;
};

TEST_F(Launcher, GivesEveryRankItsEnvironment) {
  EXPECT_EQ(
      launch(3,
             "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $MASTER_ADDR "
             "$OVERSPILL_LAUNCHER > env$RANK; echo $MASTER_PORT $OVERSPILL_TOKEN > same$RANK"),
      "0");
  for (const std::string rank : {"0", "1", "2"}) {
    EXPECT_EQ(text("env" + rank), rank + "/3 " + rank + "/3 127.0.0.1 overspill\n");
    EXPECT_EQ(text("same" + rank), text("same0"));
  }
  std::istringstream fields(text("same0"));
  int port = 0;
  std::string token;
  fields >> port >> token;
  EXPECT_GE(port, 20000);
  EXPECT_EQ(token.size(), 32u);
}

TEST_F(Launcher, PrefixesWholeLines) {
  EXPECT_EQ(launch(4,
                   "for i in 1 2 3 4 5 6 7 8 9; do printf \"begin $i \" >&2; "
                   "echo \"end $i of $RANK\" >&2; done; echo out $RANK; printf torn >&2"),
            "0");
  EXPECT_EQ(out(), "out 0\n");
  std::istringstream lines(err());
  size_t count = 0;
  for (std::string line; std::getline(lines, line); ++count) {
    ASSERT_TRUE(line.starts_with("[rank ")) << line;
    const std::string rank(1, line[6]), rest = line.substr(9);
    const bool whole = rest == "torn" || rest == "out " + rank ||
                       (rest.starts_with("begin ") && rest.ends_with(" of " + rank));
    EXPECT_TRUE(whole) << line;
  }
  EXPECT_EQ(count, 4 * 10u + 3);
}

TEST_F(Launcher, LongLinesAreCutAndAllOutputArrives) {
  EXPECT_EQ(launch(2, "head -c 300000 /dev/zero | tr '\\0' x >&2"), "0");
  EXPECT_EQ(std::ranges::count(err(), 'x'), 600000);
}

TEST_F(Launcher, NamesTheRankThatFailedFirst) {
  EXPECT_EQ(launch(3,
                   "if [ $RANK = 1 ]; then sleep 0.1; echo 'overspill: io: disk full' >&2; exit 3; "
                   "fi; sleep 0.3; echo 'overspill: rank_lost: rank 1 ended' >&2; exit 1"),
            "3");
  EXPECT_TRUE(contains(verdict(), "overspill: rank 1 (process "));
  EXPECT_TRUE(contains(verdict(), ") ended with exit code 3: io: disk full"));
}

TEST_F(Launcher, PrefersTheCauseToItsConsequences) {
  EXPECT_EQ(launch(2,
                   "if [ $RANK = 1 ]; then sleep 0.3; kill -SEGV $$; fi; "
                   "echo 'overspill: rank_lost: rank 1 is silent' >&2; exit 1"),
            "139");
  EXPECT_TRUE(contains(verdict(), "overspill: rank 1 (process "));
  EXPECT_TRUE(contains(verdict(), "was killed by signal 11 (Segmentation fault)"));
}

TEST_F(Launcher, KillsWhoDoesNotEndInTime) {
  const auto begin = Clock::now();
  EXPECT_EQ(launch(3, "[ $RANK = 0 ] && exit 7; [ $RANK = 1 ] && kill -STOP $$; sleep 60", 200),
            "7");
  EXPECT_LT(Clock::now() - begin, milliseconds(5000));
  EXPECT_TRUE(contains(verdict(), "rank 0 (process "));
  EXPECT_TRUE(contains(verdict(), "did not end within 0.2 s and were killed"));
}

TEST_F(Launcher, KillsWhoIsLeftWhenOthersHaveEndedWell) {
  ForkedRank launcher =
      start({.ranks = 3,
             .command = {"/bin/sh", "-c", "if [ $RANK = 1 ]; then kill -STOP $$; fi"},
             .grace = milliseconds(200),
             .patience = milliseconds(300)});
  const auto begin = Clock::now();
  EXPECT_EQ(launcher.wait(milliseconds(20000)).text, "137");
  EXPECT_GE(Clock::now() - begin, milliseconds(400));
  EXPECT_LT(Clock::now() - begin, milliseconds(5000));
  EXPECT_TRUE(contains(verdict(), "overspill: rank 1 (process "));
  EXPECT_TRUE(contains(verdict(), ") hangs or is stopped, while others ended well"));
}

TEST_F(Launcher, NamesACommandThatIsNotThere) {
  ForkedRank launcher = start({.ranks = 2, .command = {"/no/such/program"}});
  EXPECT_EQ(launcher.wait(milliseconds(20000)).text, "127");
  EXPECT_TRUE(contains(verdict(), "start /no/such/program: No such file or directory"));
}

TEST_F(Launcher, PassesSignalsOnOnce) {
  for (const auto& [signal, name] : {std::pair(SIGINT, "INT"), std::pair(SIGTERM, "TERM")}) {
    const std::string trap = std::string("trap 'touch stopped$RANK; exit 130' ") + name;
    ForkedRank launcher = start(2, trap + "; touch ready$RANK; while true; do sleep 0.02; done");
    ASSERT_TRUE(wait_for_files({"ready0", "ready1"}));
    launcher.send(signal);
    EXPECT_EQ(launcher.wait(milliseconds(20000)).text, "130");
    EXPECT_TRUE(fs::exists(path("stopped0")) && fs::exists(path("stopped1"))) << name;
    EXPECT_EQ(verdict(), "");
    for (const char* file : {"ready0", "ready1", "stopped0", "stopped1"}) fs::remove(path(file));
  }
}

TEST_F(Launcher, ASecondSignalKills) {
  ForkedRank launcher =
      start(2, "trap 'touch asked$RANK' INT; touch ready$RANK; while true; do sleep 0.02; done");
  ASSERT_TRUE(wait_for_files({"ready0", "ready1"}));
  launcher.send(SIGINT);
  ASSERT_TRUE(wait_for_files({"asked0", "asked1"}));
  launcher.send(SIGINT);
  EXPECT_EQ(launcher.wait(milliseconds(20000)).text, "130");
}

TEST_F(Launcher, LeavesNoProcessBehind) {
  // This process adopts what the launcher leaves, so that nothing escapes the count.
  prctl(PR_SET_CHILD_SUBREAPER, 1);
  EXPECT_EQ(launch(2, "sleep 60 & echo $! > left$RANK; exit 0"), "0");
  for (const char* name : {"left0", "left1"}) {
    const pid_t process = std::stoi(text(name));
    EXPECT_EQ(waitpid(process, nullptr, 0), process);
  }
  prctl(PR_SET_CHILD_SUBREAPER, 0);
  EXPECT_EQ(waitpid(-1, nullptr, WNOHANG), -1);
}

TEST_F(Launcher, RanksEndWithAKilledLauncher) {
  prctl(PR_SET_CHILD_SUBREAPER, 1);
  ForkedRank launcher = start({.ranks = 3,
                               .command = {"/bin/sh", "-c",
                                           "echo $$ > begun$RANK; mv begun$RANK ready$RANK; "
                                           "[ $RANK = 1 ] && kill -STOP $$; exec sleep 60"}});
  ASSERT_TRUE(wait_for_files({"ready0", "ready1", "ready2"}));
  launcher.send(SIGKILL);
  EXPECT_EQ(launcher.wait(milliseconds(20000)).signal, SIGKILL);
  for (const char* name : {"ready0", "ready1", "ready2"}) {
    int status = 0;
    EXPECT_EQ(waitpid(std::stoi(text(name)), &status, 0), std::stoi(text(name)));
    // The kernel continues a stopped group that nobody of its session is left to look after.
    EXPECT_TRUE(WTERMSIG(status) == SIGTERM || WTERMSIG(status) == SIGHUP) << status;
  }
  prctl(PR_SET_CHILD_SUBREAPER, 0);
}

}  // namespace
}  // namespace overspill
