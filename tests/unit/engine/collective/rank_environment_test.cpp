// Environments as launchers leave them, and wrong ones.
#include <gtest/gtest.h>
#include <stdlib.h>

#include <map>
#include <string>

#include "engine/base/error.h"
#include "engine/collective/rendezvous.h"
#include "engine/collective/slurm_environment.h"

namespace overspill {
namespace {

using Variables = std::map<std::string, std::string>;

/// Only these of the variables that matter are set; the test's own environment comes back.
class RankEnvironment : public testing::Test {
 protected:
  void SetUp() override {
    for (const char* name : kNames) {
      if (const char* value = getenv(name)) before_[name] = value;
    }
  }
  void TearDown() override { apply(before_); }

  static void apply(const Variables& variables) {
    for (const char* name : kNames) unsetenv(name);
    for (const auto& [name, value] : variables) setenv(name.c_str(), value.c_str(), 1);
  }
  static RankIdentity read(const Variables& variables) {
    apply(variables);
    return rank_from_environment();
  }
  static std::string refusal(const Variables& variables) {
    try {
      read(variables);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_config);
      return error.what();
    }
    ADD_FAILURE() << "not refused";
    return {};
  }

 private:
  static constexpr const char* kNames[] = {"RANK",
                                           "WORLD_SIZE",
                                           "LOCAL_RANK",
                                           "LOCAL_WORLD_SIZE",
                                           "MASTER_ADDR",
                                           "MASTER_PORT",
                                           "OVERSPILL_LAUNCHER",
                                           "OVERSPILL_TOKEN",
                                           "OVERSPILL_MASTER_PORT",
                                           "TORCHELASTIC_RUN_ID",
                                           "TORCHELASTIC_RESTART_COUNT",
                                           "TORCHELASTIC_USE_AGENT_STORE",
                                           "OMPI_COMM_WORLD_RANK",
                                           "OMPI_COMM_WORLD_SIZE",
                                           "OMPI_COMM_WORLD_LOCAL_RANK",
                                           "OMPI_COMM_WORLD_LOCAL_SIZE",
                                           "PMIX_NAMESPACE",
                                           "SLURM_PROCID",
                                           "SLURM_NTASKS",
                                           "SLURM_LOCALID",
                                           "SLURM_NODEID",
                                           "SLURM_NTASKS_PER_NODE",
                                           "SLURM_STEP_TASKS_PER_NODE",
                                           "SLURM_STEP_NUM_TASKS",
                                           "SLURM_STEP_NODELIST",
                                           "SLURM_JOB_NODELIST",
                                           "SLURM_JOB_ID",
                                           "SLURM_STEP_ID"};
  Variables before_;
};

const Variables kTorchrun = {{"RANK", "5"},
                             {"WORLD_SIZE", "8"},
                             {"LOCAL_RANK", "1"},
                             {"LOCAL_WORLD_SIZE", "4"},
                             {"MASTER_ADDR", "node1"},
                             {"MASTER_PORT", "29400"},
                             {"TORCHELASTIC_RUN_ID", "abc"},
                             {"TORCHELASTIC_USE_AGENT_STORE", "True"}};
const Variables kOpenMpi = {{"OMPI_COMM_WORLD_RANK", "1"},
                            {"OMPI_COMM_WORLD_SIZE", "2"},
                            {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                            {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                            {"PMIX_NAMESPACE", "1193279489"}};
const Variables kSlurm = {{"SLURM_PROCID", "4"},
                          {"SLURM_NTASKS", "16"},
                          {"SLURM_STEP_NUM_TASKS", "7"},
                          {"SLURM_LOCALID", "0"},
                          {"SLURM_NODEID", "2"},
                          {"SLURM_STEP_TASKS_PER_NODE", "2(x2),3"},
                          {"SLURM_STEP_NODELIST", "node[07-08,12]"},
                          {"SLURM_JOB_NODELIST", "node[01-12]"},
                          {"SLURM_JOB_ID", "4711"},
                          {"SLURM_STEP_ID", "0"}};

Variables with(Variables variables, const std::string& name, const std::string& value) {
  variables[name] = value;
  return variables;
}

Variables without(Variables variables, const std::string& name) {
  variables.erase(name);
  return variables;
}

TEST_F(RankEnvironment, NothingIsOneRank) {
  const RankIdentity identity = read({});
  EXPECT_EQ(identity.rank, 0u);
  EXPECT_EQ(identity.ranks, 1u);
  EXPECT_EQ(identity.launcher, "none");
}

TEST_F(RankEnvironment, ReadsOwnLauncher) {
  const RankIdentity identity = read({{"RANK", "1"},
                                      {"WORLD_SIZE", "2"},
                                      {"LOCAL_RANK", "1"},
                                      {"LOCAL_WORLD_SIZE", "2"},
                                      {"MASTER_ADDR", "127.0.0.1"},
                                      {"MASTER_PORT", "23456"},
                                      {"OVERSPILL_TOKEN", "secret"},
                                      {"OVERSPILL_LAUNCHER", "overspill"},
                                      {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                                      {"TORCHELASTIC_RUN_ID", "outer"}});
  EXPECT_EQ(identity.launcher, "overspill");
  EXPECT_EQ(identity.rank, 1u);
  EXPECT_EQ(identity.ranks, 2u);
  EXPECT_EQ(identity.master_port, 23456);
  EXPECT_EQ(identity.token, "secret");
}

TEST_F(RankEnvironment, TorchrunsAgentKeepsItsPort) {
  const RankIdentity identity = read(kTorchrun);
  EXPECT_EQ(identity.launcher, "torchrun");
  EXPECT_EQ(identity.rank, 5u);
  EXPECT_EQ(identity.ranks, 8u);
  EXPECT_EQ(identity.local_rank, 1u);
  EXPECT_EQ(identity.local_ranks, 4u);
  EXPECT_EQ(identity.master_addr, "node1");
  EXPECT_EQ(identity.master_port, 29401);
  EXPECT_EQ(read(with(kTorchrun, "TORCHELASTIC_USE_AGENT_STORE", "False")).master_port, 29400);
  EXPECT_EQ(read(with(kTorchrun, "OVERSPILL_MASTER_PORT", "7777")).master_port, 7777);
}

TEST_F(RankEnvironment, TorchrunsRestartsDoNotMeet) {
  const std::string token = read(with(kTorchrun, "TORCHELASTIC_RESTART_COUNT", "0")).token;
  EXPECT_FALSE(token.empty());
  EXPECT_NE(token, read(with(kTorchrun, "TORCHELASTIC_RESTART_COUNT", "1")).token);
}

TEST_F(RankEnvironment, ReadsOpenMpi) {
  const RankIdentity identity = read(kOpenMpi);
  EXPECT_EQ(identity.launcher, "Open MPI");
  EXPECT_EQ(identity.rank, 1u);
  EXPECT_EQ(identity.local_ranks, 2u);
  EXPECT_EQ(identity.master_addr, "127.0.0.1");
  EXPECT_NE(identity.master_port, read(with(kOpenMpi, "PMIX_NAMESPACE", "7")).master_port);
  const std::string what = refusal(
      with(with(kOpenMpi, "OMPI_COMM_WORLD_LOCAL_SIZE", "1"), "OMPI_COMM_WORLD_LOCAL_RANK", "0"));
  EXPECT_NE(what.find("mpirun -x MASTER_ADDR=..."), std::string::npos) << what;
}

TEST_F(RankEnvironment, ReadsSlurmsStep) {
  const RankIdentity identity = read(kSlurm);
  EXPECT_EQ(identity.launcher, "Slurm");
  EXPECT_EQ(identity.rank, 4u);
  EXPECT_EQ(identity.ranks, 7u);
  EXPECT_EQ(identity.local_ranks, 3u);
  EXPECT_EQ(identity.master_addr, "node07");
  EXPECT_GE(identity.master_port, 20000);
  EXPECT_EQ(read(with(kSlurm, "MASTER_ADDR", "x")).master_addr, "x");
  EXPECT_EQ(read(with(kSlurm, "MASTER_PORT", "3000")).master_port, 3000);
  EXPECT_NE(read(with(kSlurm, "SLURM_STEP_ID", "1")).master_port, identity.master_port);
}

TEST_F(RankEnvironment, AShellOfAnAllocationIsOneRank) {
  EXPECT_EQ(read(without(kSlurm, "SLURM_STEP_ID")).ranks, 1u);
}

TEST_F(RankEnvironment, ReadsSlurmsLists) {
  EXPECT_EQ(first_slurm_host("node1"), "node1");
  EXPECT_EQ(first_slurm_host("node[07-10,12],other"), "node07");
  EXPECT_EQ(first_slurm_host("other,node[1-2]"), "other");
  EXPECT_EQ(first_slurm_host("rack[1-2]n[03,4]-ib"), "rack1n03-ib");
  EXPECT_EQ(first_slurm_host("node[1-2"), "");
  EXPECT_EQ(slurm_count_at("4(x2),3", 1), 4u);
  EXPECT_EQ(slurm_count_at("4(x2),3", 2), 3u);
  EXPECT_FALSE(slurm_count_at("4(x2),3", 3));
  EXPECT_FALSE(slurm_count_at("4(x,3", 1));
}

TEST_F(RankEnvironment, NamesWhatIsWrong) {
  const Variables pair = {{"RANK", "0"}, {"WORLD_SIZE", "4"}};
  EXPECT_EQ(refusal(with(pair, "RANK", "7")), "RANK=7 with WORLD_SIZE=4: ranks count from 0 to 3");
  EXPECT_EQ(refusal(with(pair, "RANK", "abc")),
            "RANK=abc: must be a whole number from 0 to 1048575");
  EXPECT_EQ(refusal(with(pair, "RANK", "-1")), "RANK=-1: must be a whole number from 0 to 1048575");
  EXPECT_EQ(refusal(with(pair, "WORLD_SIZE", "0")),
            "WORLD_SIZE=0: must be a whole number from 1 to 1048576");
  EXPECT_EQ(refusal(without(pair, "WORLD_SIZE")),
            "RANK is set in the environment, but WORLD_SIZE is not; set both, or neither");
  EXPECT_EQ(refusal(without(pair, "RANK")),
            "WORLD_SIZE is set in the environment, but RANK is not; set both, or neither");
  EXPECT_EQ(refusal(with(pair, "MASTER_PORT", "65536")),
            "MASTER_PORT=65536: must be a whole number from 1 to 65535");
  EXPECT_EQ(refusal(with(with(pair, "LOCAL_RANK", "2"), "LOCAL_WORLD_SIZE", "2")),
            "LOCAL_RANK=2 with LOCAL_WORLD_SIZE=2: ranks count from 0 to 1");
  EXPECT_NE(refusal(with(with(pair, "LOCAL_RANK", "0"), "LOCAL_WORLD_SIZE", "2"))
                .find("export MASTER_ADDR=..."),
            std::string::npos);
}

}  // namespace
}  // namespace overspill
