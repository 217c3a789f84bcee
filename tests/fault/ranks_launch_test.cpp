// Runs of several ranks as users start them: by the command itself, torchrun, mpirun and srun, over
// hosts of their own. All give the same bits; what does not fit together is refused.
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include "engine/base/fd.h"
#include "tests/fault/launch_fixture.h"
#include "tests/fault/ranks_process_fixture.h"

namespace overspill::test {
namespace {

class RanksLaunch : public RanksProcessTest {
 protected:
  /// What the command's own launcher makes of a run of two ranks.
  Outcome reference() {
    const Child::Result result = launch(2, "reference")->wait();
    EXPECT_EQ(result.exit_code, 0) << result.err;
    return outcome("reference");
  }
  void expect_finished(const Child::Result& result) const {
    EXPECT_FALSE(result.timed_out);
    EXPECT_EQ(result.exit_code, 0) << result.err;
  }
  /// As the host's agents do: each rank with variables of its own.
  std::vector<Child::Result> run_two(const std::string& output,
                                     const std::function<Words(int)>& variables,
                                     const std::vector<Words>& sets = {{}, {}}) const {
    std::vector<std::unique_ptr<Child>> ranks;
    for (const int rank : {0, 1}) {
      ranks.push_back(
          start_program(OVERSPILL_BINARY, train_words(output, sets.at(rank)), variables(rank)));
    }
    std::vector<Child::Result> results;
    for (const auto& rank : ranks) results.push_back(rank->wait());
    return results;
  }
  /// Those that torchrun 2 sets for a script.
  static Words torchrun_variables(int rank, uint16_t port, bool agent_store) {
    const std::string number = std::to_string(rank);
    return {"RANK=" + number,
            "LOCAL_RANK=" + number,
            "GROUP_RANK=0",
            "ROLE_RANK=" + number,
            "ROLE_NAME=default",
            "WORLD_SIZE=2",
            "LOCAL_WORLD_SIZE=2",
            "GROUP_WORLD_SIZE=1",
            "ROLE_WORLD_SIZE=2",
            "MASTER_ADDR=localhost",
            "MASTER_PORT=" + std::to_string(port),
            "TORCHELASTIC_RESTART_COUNT=0",
            "TORCHELASTIC_MAX_RESTARTS=0",
            "TORCHELASTIC_RUN_ID=none",
            std::string("TORCHELASTIC_USE_AGENT_STORE=") + (agent_store ? "True" : "False"),
            "TORCHELASTIC_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGHUP,SIGQUIT",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING=1",
            "OMP_NUM_THREADS=1"};
  }
};

TEST_F(RanksLaunch, OwnLauncherOfOneTwoAndFourRanks) {
  for (const uint32_t ranks : {1u, 2u, 4u}) {
    const std::string output = fmt::format("out-{}", ranks);
    const Child::Result result = launch(ranks, output)->wait();
    expect_finished(result);
    // Only the first rank speaks to people.
    EXPECT_EQ(count_of(result.out, "step 1/3 "), 1u) << result.out;
    EXPECT_EQ(count_of(result.out, "finished after 3 steps"), 1u) << result.out;
    EXPECT_EQ(count_of(result.out, "what follows is rank 0's part"), ranks > 1 ? 1u : 0u);
    EXPECT_EQ(result.out.find("[rank"), std::string::npos) << result.out;
    std::istringstream lines(result.err);
    for (std::string line; std::getline(lines, line);) {
      EXPECT_EQ(line.starts_with("[rank "), ranks > 1) << line;
    }
    EXPECT_EQ(count_of(result.err, "NVMe I/O uses"), 1u) << result.err;
    EXPECT_EQ(metrics_of(root_ / output).size(), 4u);
    EXPECT_EQ(open_checkpoint(root_ / output / "latest").position.step, 3u);
    EXPECT_TRUE(fs::is_empty(root_ / "nvme0"));
    expect_nobody_left();
  }
}

TEST_F(RanksLaunch, TwoRunsAtOnceDoNotDisturbEachOther) {
  const Outcome alone = reference();
  const auto first = launch(2, "first"), second = launch(2, "second");
  expect_finished(first->wait());
  expect_finished(second->wait());
  expect_same(alone, outcome("first"));
  expect_same(alone, outcome("second"));
}

TEST_F(RanksLaunch, TorchrunsEnvironment) {
  const Outcome own = reference();
  for (const bool agent_store : {false, true}) {
    const uint16_t port = free_port();
    // The agent's store is at that port then.
    const Fd agent(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), "the agent's store");
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    if (agent_store) {
      ASSERT_EQ(bind(agent.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
      ASSERT_EQ(listen(agent.get(), 8), 0);
    }
    const std::string output = agent_store ? "agent" : "static";
    const auto results =
        run_two(output, [&](int rank) { return torchrun_variables(rank, port, agent_store); });
    for (const Child::Result& result : results) expect_finished(result);
    EXPECT_TRUE(has(results[0].out, "finished after 3 steps"));
    EXPECT_EQ(results[1].out, "");
    expect_same(own, outcome(output));
  }
}

TEST_F(RanksLaunch, Torchrun) {
  const char* named = std::getenv("OVERSPILL_TORCHRUN");
  const std::string torchrun = named != nullptr ? named : shell("which torchrun").value_or("");
  if (torchrun.empty()) GTEST_SKIP() << "no torchrun in PATH, nor named by OVERSPILL_TORCHRUN";
  const Outcome own = reference();
  // The agent serves the store with --standalone, and with a rendezvous of one node does not.
  for (const Words& how :
       {Words{"--standalone"},
        Words{"--master-addr", "127.0.0.1", "--master-port", std::to_string(free_port())}}) {
    const std::string output = "out" + how[0];
    Words words = how;
    words.insert(words.end(), {"--nproc-per-node", "2", "--no-python", OVERSPILL_BINARY});
    const Words train = train_words(output, {});
    words.insert(words.end(), train.begin(), train.end());
    expect_finished(start_program(torchrun, words)->wait(120));
    expect_same(own, outcome(output));
    expect_nobody_left();
  }
}

TEST_F(RanksLaunch, OpenMpi) {
  if (!shell("which mpirun")) GTEST_SKIP() << "no mpirun in PATH (Debian: openmpi-bin)";
  const Outcome own = reference();
  Words words = {"-n", "2", "--allow-run-as-root", "--oversubscribe", OVERSPILL_BINARY};
  const Words train = train_words("mpi", {});
  words.insert(words.end(), train.begin(), train.end());
  const Child::Result result = start_program("mpirun", words)->wait();
  expect_finished(result);
  EXPECT_EQ(count_of(result.out, "finished after 3 steps"), 1u) << result.out;
  expect_same(own, outcome("mpi"));
  expect_nobody_left();
}

TEST_F(RanksLaunch, SlurmsEnvironment) {
  const Outcome own = reference();
  const auto results = run_two("slurm", [](int rank) -> Words {
    return {"SLURM_JOB_ID=" + std::to_string(getpid()),
            "SLURM_STEP_ID=0",
            "SLURM_PROCID=" + std::to_string(rank),
            "SLURM_LOCALID=" + std::to_string(rank),
            "SLURM_NODEID=0",
            "SLURM_NTASKS=8",  // the allocation's
            "SLURM_STEP_NUM_TASKS=2",
            "SLURM_STEP_TASKS_PER_NODE=2",
            "SLURM_STEP_NODELIST=localhost",
            "SLURM_JOB_NODELIST=localhost"};
  });
  for (const Child::Result& result : results) expect_finished(result);
  EXPECT_EQ(results[1].out, "");
  expect_same(own, outcome("slurm"));
}

TEST_F(RanksLaunch, RanksInsideAnotherLauncherAreRefused) {
  const Child::Result result = start_program(OVERSPILL_BINARY, train_words("out", {}, 4),
                                             torchrun_variables(0, free_port(), false))
                                   ->wait();
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_TRUE(has(result.err, "--ranks 4: this process is one of 2 ranks that torchrun"));
  EXPECT_FALSE(fs::exists(root_ / "out"));
}

TEST_F(RanksLaunch, ARankWithoutTheirNumberIsRefused) {
  const Child::Result result =
      start_program(OVERSPILL_BINARY, train_words("out", {}), {"RANK=1"})->wait();
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_TRUE(has(result.err, "RANK is set in the environment, but WORLD_SIZE is not"));
  EXPECT_FALSE(fs::exists(root_ / "out"));
}

TEST_F(RanksLaunch, GroupsThatDoNotDivideTheRanksAreRefused) {
  const Child::Result result = launch(4, "out", {"hybrid_shard=3"})->wait();
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_TRUE(has(last_line(result.err), "groups of 3 ranks do not divide the run's 4 ranks"));
  EXPECT_FALSE(fs::exists(root_ / "out"));
  expect_nobody_left();
}

TEST_F(RanksLaunch, AnotherConfigurationIsRefusedByTheLineThatDiffers) {
  const uint16_t port = free_port();
  const auto results =
      run_two("out", [&](int rank) { return torchrun_variables(rank, port, false); },
              {{"learning_rate=0.01"}, {"learning_rate=0.02"}});
  for (const Child::Result& result : results) {
    EXPECT_EQ(result.exit_code, 2) << result.err;
    EXPECT_TRUE(has(last_line(result.err), "rank 1 "));
    EXPECT_TRUE(has(last_line(result.err), "another configuration than rank 0 "));
    EXPECT_TRUE(
        has(last_line(result.err), "\"learning_rate: 0.02\" instead of \"learning_rate: 0.01\""));
  }
  EXPECT_FALSE(fs::exists(root_ / "out"));
}

}  // namespace
}  // namespace overspill::test
