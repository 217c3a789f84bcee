// Runs over two hosts, which are network namespaces joined by a cable: to the end, and cut in the
// midst of it.
#include "tests/fault/launch_fixture.h"
#include "tests/fault/ranks_process_fixture.h"

namespace overspill::test {
namespace {

class RanksOfTwoHosts : public RanksProcessTest {
 protected:
  void SetUp() override {
    RanksProcessTest::SetUp();
    const std::string cable = "link add " + host(0) + " type veth peer name " + host(1);
    made_ =
        ip("netns add " + host(0)) && ip("netns add " + host(1)) && ip(cable) && join(0) && join(1);
    if (!made_) GTEST_SKIP() << "network namespaces are not permitted here, or ip is missing";
  }
  void TearDown() override {
    for (const int number : {0, 1}) ip("netns del " + host(number));
    RanksProcessTest::TearDown();
  }
  static std::string host(int number) { return fmt::format("ovr{}{}", "ab"[number], getpid()); }
  static bool ip(const std::string& words) {
    return shell("PATH=$PATH:/usr/sbin ip " + words).has_value();
  }
  static bool join(int number) {
    const std::string name = host(number), inside = "-n " + name + " ";
    return ip("link set " + name + " netns " + name) &&
           ip(inside + fmt::format("addr add 10.213.8.{}/24 dev {}", number + 1, name)) &&
           ip(inside + "link set lo up") && ip(inside + "link set " + name + " up");
  }

  /// The script that runs its arguments there, under the host's name.
  static std::string in_host(int number) {
    return fmt::format(
        "PATH=$PATH:/usr/sbin exec ip netns exec {0} unshare --uts "
        "sh -c 'hostname {0}; exec \"$@\"' sh \"$@\"",
        host(number));
  }
  /// Two ranks on each host, which share the output directory.
  std::vector<std::unique_ptr<Child>> start(const std::string& output, const Words& sets) const {
    const uint16_t port = free_port();
    std::vector<std::unique_ptr<Child>> ranks;
    for (int rank = 0; rank < 4; ++rank) {
      const int number = rank / 2;
      Words words = {"-c", in_host(number), "sh", OVERSPILL_BINARY};
      Words own = sets;
      own.push_back("offload.nvme_paths=[" +
                    (root_ / fmt::format("{}-nvme{}", output, number)).string() + "]");
      const Words train = train_words(output, own);
      words.insert(words.end(), train.begin(), train.end());
      ranks.push_back(start_program(
          "/bin/sh", words,
          {fmt::format("RANK={}", rank), "WORLD_SIZE=4", fmt::format("LOCAL_RANK={}", rank % 2),
           "LOCAL_WORLD_SIZE=2", "MASTER_ADDR=10.213.8.1", fmt::format("MASTER_PORT={}", port)}));
    }
    return ranks;
  }
  Outcome finish(const std::string& output, const Words& sets) const {
    for (const auto& rank : start(output, sets)) {
      const Child::Result result = rank->wait();
      EXPECT_EQ(result.exit_code, 0) << result.err;
    }
    return outcome(output);
  }

 private:
  bool made_ = false;
};

TEST_F(RanksOfTwoHosts, GiveTheBitsOfOneHost) {
  ASSERT_EQ(launch(4, "one")->wait().exit_code, 0);
  expect_same(outcome("one"), finish("two", {}));
  expect_nobody_left();
}

TEST_F(RanksOfTwoHosts, ShareTheStateInsideAHost) {
  ASSERT_EQ(launch(4, "one", {"hybrid_shard=2"})->wait().exit_code, 0);
  expect_same(outcome("one"), finish("two", {"hybrid_shard=true"}));
  expect_nobody_left();
}

TEST_F(RanksOfTwoHosts, ACutEndsBothSidesInTime) {
  constexpr double kTimeout = kSanitized ? 20 : 4, kSlack = kSanitized ? 20 : 4;
  for (const int side : {0, 1}) {
    const std::string output = fmt::format("cut-{}", side);
    const auto ranks = start(output, {"max_steps=100000", "save_steps=2", "save_total_limit=2",
                                      fmt::format("rank_timeout={}", kTimeout)});
    ASSERT_TRUE(wait_for_line(*ranks[0], output, 5)) << ranks[0]->wait().err;
    ASSERT_TRUE(ip("-n " + host(side) + " link set " + host(side) + " down"));
    const auto start = std::chrono::steady_clock::now();
    for (int rank = 0; rank < 4; ++rank) {
      const Child::Result result = ranks[rank]->wait();
      EXPECT_EQ(result.exit_code, 1) << result.err;
      const std::string last = last_line(result.err);
      if (rank < 2) {
        EXPECT_TRUE(last.starts_with("overspill: rank_lost: rank 2 (host ") ||
                    last.starts_with("overspill: rank_lost: rank 3 (host "))
            << rank << ": " << last;
      } else {
        EXPECT_TRUE(last.starts_with("overspill: rank_lost: rank 0 (host ")) << rank << last;
      }
    }
    EXPECT_LT(std::chrono::steady_clock::now() - start,
              std::chrono::duration<double>(kTimeout + kSlack));
    open_checkpoint(root_ / output / "latest");
    expect_nobody_left();
    ASSERT_TRUE(ip("-n " + host(side) + " link set " + host(side) + " up"));
  }
}

}  // namespace
}  // namespace overspill::test
