// A rank, or the launcher, that is killed, stopped or crashes at a random moment of a whole run:
// the command ends in time, names it, leaves no process; the last checkpoint goes on to the same
// bits.
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>

#include <atomic>
#include <thread>

#include "engine/base/fd.h"
#include "engine/base/random.h"
#include "tests/fault/ranks_process_fixture.h"

namespace overspill::test {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint32_t kRanks = 4;
constexpr double kRankTimeout = kSanitized ? 20 : 4, kGrace = 10, kSlack = kSanitized ? 20 : 6;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// What comes over a run, and when.
struct Fault {
  uint64_t seed = 0;
  int signal = SIGKILL;
  bool launcher = false;  ///< it, or the rank
  uint32_t rank = 0;
  double moment = 0;  ///< seconds after the start

  static Fault of_seed(uint64_t seed, double duration) {
    constexpr int kSignals[] = {SIGKILL, SIGSEGV, SIGSTOP, SIGKILL};
    const uint64_t kind = random_below(seed, 0, 4);
    return {.seed = seed,
            .signal = kSignals[kind],
            .launcher = kind == 3,
            .rank = static_cast<uint32_t>(random_below(seed, 1, kRanks)),
            .moment = duration * static_cast<double>(random_below(seed, 2, 1000)) / 1000};
  }
  std::string name() const {
    return fmt::format("seed {}: signal {} to {} after {:.3f} s", seed, signal,
                       launcher ? "the launcher" : fmt::format("rank {}", rank), moment);
  }
};

class RanksFault : public RanksProcessTest {
 protected:
  static constexpr uint32_t kSteps = 12;

  Words sets(const std::string& output, const Words& more = {}) const {
    Words sets = {fmt::format("max_steps={}", kSteps), "save_steps=2", "logging_steps=1000",
                  fmt::format("rank_timeout={}", kRankTimeout),
                  "offload.nvme_paths=[" + (root_ / (output + "-nvme")).string() + "]"};
    sets.insert(sets.end(), more.begin(), more.end());
    return sets;
  }
  std::unique_ptr<Child> begin(const std::string& output, const Words& more = {}) const {
    return launch(kRanks, output, sets(output, more));
  }
  /// An undisturbed run.
  void run_reference() {
    const auto start = Clock::now();
    const Child::Result result = begin("reference")->wait();
    ASSERT_EQ(result.exit_code, 0) << result.err;
    duration_ = seconds_since(start);
    reference_ = outcome("reference");
  }
  /// Continues a run to its end, which is the undisturbed one's.
  void expect_resume(const std::string& output) const {
    const Child::Result result = begin(output, {"resume_from_checkpoint=true"})->wait(60 + kSlack);
    ASSERT_EQ(result.exit_code, 0) << result.err;
    expect_same(reference_, outcome(output));
    for (const std::string& name : names_in(root_ / output)) {
      EXPECT_FALSE(name.starts_with(".")) << name;
    }
    EXPECT_EQ(names_in(root_ / (output + "-nvme")), Words{});
    expect_nobody_left(output);
  }

  /// False when there is nothing to strike yet, or any more.
  static bool strike(const Fault& fault, Child& run) {
    if (run.ended()) return false;
    const pid_t victim = fault.launcher ? run.process() : rank_process(run.process(), fault.rank);
    return victim > 0 && kill(victim, fault.signal) == 0;
  }
  /// One run under a fault; returns whether it was struck before it had ended.
  bool try_fault(const Fault& fault) const {
    SCOPED_TRACE(fault.name());
    const std::string output = fmt::format("trial-{}", fault.seed);
    const auto run = begin(output);
    std::this_thread::sleep_for(std::chrono::duration<double>(fault.moment));
    const bool struck = run->wait_until([&] { return strike(fault, *run); }, 1);
    const auto moment = Clock::now();
    const Child::Result result = run->wait();
    const double seconds = seconds_since(moment);
    EXPECT_LT(seconds, kRankTimeout + kGrace + kSlack) << result.err;
    // Its process may have come to its end without having been waited for.
    const bool finished = result.exit_code == 0;
    EXPECT_TRUE(struck || finished) << result.err;
    if (!finished && fault.launcher) {
      EXPECT_EQ(result.signal, SIGKILL) << result.err;
    } else if (!finished) {
      expect_named(fault, result);
    }
    expect_nobody_left(output, fault.launcher ? kRankTimeout + kSlack : 1);
    const fs::path latest = root_ / output / "latest";
    if (fs::exists(latest)) open_checkpoint(latest);
    if (!finished) expect_resume(output);
    fs::remove_all(root_ / output);
    fs::remove_all(root_ / (output + "-nvme"));
    return !finished;
  }
  /// In the last line, and no other rank as the cause.
  static void expect_named(const Fault& fault, const Child::Result& result) {
    const std::string last = last_line(result.err);
    if (fault.signal != SIGSTOP) {
      EXPECT_EQ(result.exit_code, 128 + fault.signal) << result.err;
      EXPECT_TRUE(last.starts_with(fmt::format("overspill: rank {} (process ", fault.rank)))
          << last;
      EXPECT_TRUE(has(last, fmt::format("was killed by signal {} ", fault.signal)));
      return;
    }
    if (last.find("while others ended well") != std::string::npos) {
      EXPECT_EQ(result.exit_code, 137) << result.err;
      EXPECT_TRUE(last.starts_with(fmt::format("overspill: rank {} (process ", fault.rank)))
          << last;
      return;
    }
    EXPECT_EQ(result.exit_code, 1) << result.err;
    EXPECT_TRUE(
        last.ends_with(fmt::format("; rank {} did not end within 10 s and was killed", fault.rank)))
        << result.err;
    const size_t lost = last.find("rank_lost: ");
    ASSERT_NE(lost, std::string::npos) << result.err;
    const std::string cause = last.substr(lost + 11);
    const size_t at = cause.find("cannot find rank 0");  // which had not got so far as to listen
    EXPECT_TRUE((at == std::string::npos ? cause : cause.substr(at + 12))
                    .starts_with(fmt::format("rank {} ", fault.rank)))
        << result.err;
  }

  Outcome reference_;
  double duration_ = 0;
};

TEST_F(RanksFault, AnyMomentOfARun) {
  const char* more = std::getenv("OVERSPILL_FAULT_TRIALS");
  const char* first = std::getenv("OVERSPILL_FAULT_SEED");
  const uint64_t trials = more != nullptr ? std::stoull(more) : kSanitized ? 8 : 40;
  const uint64_t first_seed = first != nullptr ? std::stoull(first) : 1;
  ASSERT_NO_FATAL_FAILURE(run_reference());
  std::vector<Fault> faults[2];  // those of stopped ranks, which take long and little, and others
  for (uint64_t seed = first_seed; seed < first_seed + trials; ++seed) {
    const Fault fault = Fault::of_seed(seed, 2 * duration_);
    faults[fault.signal == SIGSTOP].push_back(fault);
  }
  std::atomic<size_t> next[2] = {0, 0}, struck = 0;
  {
    std::vector<std::jthread> workers;
    for (const size_t kind : {0, 0, 0, 1, 1, 1, 1, 1}) {
      workers.emplace_back([&, kind] {
        for (size_t i; (i = next[kind]++) < faults[kind].size();) {
          struck += try_fault(faults[kind][i]);
          if (HasFatalFailure()) return;
        }
      });
    }
  }
  EXPECT_GT(struck * 2, trials) << "most runs were over before their fault";
}

bool has_open(pid_t process, const fs::path& path) {
  std::error_code error;
  for (fs::directory_iterator fd(fmt::format("/proc/{}/fd", process), error), end;
       !error && fd != end; fd.increment(error)) {
    std::error_code ignored;
    if (fs::read_symlink(*fd, ignored) == path) return true;
  }
  return false;
}

/// Ranks that wait for something else than ranks, here for a lock of their drive, are not woken.
TEST_F(RanksFault, RanksThatCannotEndInOrderSayWhy) {
  const fs::path drive = root_ / "out-nvme";
  fs::create_directory(drive);
  const Fd lock = open_file(drive, O_RDONLY | O_DIRECTORY);
  ASSERT_EQ(flock(lock.get(), LOCK_EX), 0);
  const auto run = begin("out");
  const auto waits = [&](uint32_t rank) {
    return has_open(rank_process(run->process(), rank), drive);
  };
  ASSERT_TRUE(run->wait_until([&] { return waits(0) && waits(1) && waits(2) && waits(3); }));
  kill(rank_process(run->process(), 2), SIGKILL);
  const Child::Result result = run->wait();
  EXPECT_EQ(result.exit_code, 137) << result.err;
  EXPECT_TRUE(last_line(result.err).starts_with("overspill: rank 2 (process ")) << result.err;
  EXPECT_EQ(result.err.find("did not end within"), std::string::npos) << result.err;
  for (const int rank : {0, 1, 3}) {
    EXPECT_TRUE(has(result.err, fmt::format("; rank {} could not end in order", rank)));
  }
  expect_nobody_left("out");
}

// ---- asked to stop ---------------------------------------------------------------------------

class RanksStop : public RanksFault {
 protected:
  void SetUp() override {
    RanksFault::SetUp();
    ASSERT_NO_FATAL_FAILURE(run_reference());
  }
  /// A run that was asked to stop: all its ranks after the same step, which is saved.
  void expect_stopped(Child& run, const std::string& output) const {
    const Child::Result result = run.wait();
    EXPECT_EQ(result.exit_code, 130) << result.err;
    EXPECT_EQ(result.err.find("overspill: "), std::string::npos) << result.err;
    EXPECT_EQ(count_of(result.out, "interrupted after "), 1u) << result.out;
    EXPECT_TRUE(has(result.out, "--ranks 4 --set resume_from_checkpoint=true"));
    const Json last = metrics_of(root_ / output).back();
    EXPECT_EQ(last.at("interrupted"), true);
    EXPECT_EQ(open_checkpoint(root_ / output / "latest").position.step,
              last.at("step").get<uint64_t>());
    expect_nobody_left(output);
    expect_resume(output);
  }
};

/// Whether the process has a handler for the signal.
bool catches(pid_t process, int signal) {
  std::istringstream status(bytes_of_file(fmt::format("/proc/{}/status", process)));
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("SigCgt:"))
      return std::stoull(line.substr(7), nullptr, 16) >> (signal - 1) & 1;
  }
  return false;
}

/// As when the run is killed before `latest` names its first checkpoint.
TEST_F(RanksStop, ACheckpointThatWasNotYetNamedIsGoneOnFrom) {
  ASSERT_EQ(begin("out", {"max_steps=2"})->wait().exit_code, 0);
  fs::remove(root_ / "out" / "latest");
  expect_resume("out");
}

TEST_F(RanksStop, AnInterruptOfTheLauncherStopsAllAfterOneStep) {
  const auto run = begin("out");
  ASSERT_TRUE(wait_for_line(*run, "out", 2)) << run->wait().err;
  run->send(SIGINT);
  expect_stopped(*run, "out");
}

TEST_F(RanksStop, ATerminatedRankStopsAllAfterOneStep) {
  const auto run = begin("out");
  ASSERT_TRUE(wait_for_line(*run, "out", 2)) << run->wait().err;
  kill(rank_process(run->process(), 2), SIGTERM);
  expect_stopped(*run, "out");
}

/// As a service manager does; each rank then has one signal of it and one of the launcher.
TEST_F(RanksStop, ASignalToTheWholeTreeStopsAllAfterOneStep) {
  const auto run = begin("out");
  ASSERT_TRUE(wait_for_line(*run, "out", 2)) << run->wait().err;
  for (const pid_t process : processes("out")) kill(process, SIGTERM);
  expect_stopped(*run, "out");
}

TEST_F(RanksStop, ASecondInterruptOfTheLauncherKillsTheRanks) {
  const auto run = begin("out", {"gradient_accumulation_steps=20000", "rank_timeout=60"});
  ASSERT_TRUE(run->wait_until([&] {
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      if (!catches(rank_process(run->process(), rank), SIGINT)) return false;
    }
    return true;
  }));
  run->send(SIGINT);
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  EXPECT_FALSE(run->ended()) << run->wait().err;
  run->send(SIGINT);
  const Child::Result result = run->wait(10);
  EXPECT_EQ(result.exit_code, 130) << result.err;
  expect_nobody_left("out");
}

}  // namespace
}  // namespace overspill::test
