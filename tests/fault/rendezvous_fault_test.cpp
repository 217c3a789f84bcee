// Ranks that are killed, stopped, continued or cut off at random moments: the others end in time
// and name the right one, nobody hangs, nothing is left.
#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <stdlib.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "engine/base/random.h"
#include "engine/collective/rendezvous.h"
#include "tests/fault/launch_fixture.h"

namespace overspill {
namespace {

using test::contains;
using test::ForkedRank;
using test::free_port;
using test::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr milliseconds kSilence{500}, kJoin{1000}, kBound{20000};

RankIdentity rank_of(uint32_t rank, uint32_t ranks, uint16_t port) {
  return {.rank = rank,
          .ranks = ranks,
          .local_rank = rank,
          .local_ranks = ranks,
          .master_addr = "127.0.0.1",
          .master_port = port,
          .token = "token",
          .launcher = "none"};
}

/// Joins, then waits for a failure, whose text it returns; "no failure" after a while.
std::string wait_for_failure(const RankIdentity& identity) {
  const Rendezvous rendezvous(
      identity, {.join_timeout = kJoin, .silence_timeout = kSilence, .config = "a: 1\n"});
  return rendezvous.failure(milliseconds(10000)).value_or("no failure");
}

/// Four ranks of which one comes to grief.
struct Trial {
  uint64_t seed = 0;
  uint32_t victim = 0;
  Clock::time_point moment;
  bool done = false;
  std::vector<ForkedRank> ranks;

  std::string name() const { return fmt::format("seed {}, victim {}", seed, victim); }
};

constexpr uint32_t kRanks = 4;

std::vector<std::unique_ptr<Trial>> start_trials(uint64_t first_seed, uint32_t count,
                                                 int spread_ms) {
  std::vector<std::unique_ptr<Trial>> trials;
  for (uint32_t i = 0; i < count; ++i) {
    auto trial = std::make_unique<Trial>();
    trial->seed = first_seed + i;
    trial->victim = static_cast<uint32_t>(random_below(trial->seed, 0, kRanks));
    const uint16_t port = free_port();
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      trial->ranks.emplace_back([=] { return wait_for_failure(rank_of(rank, kRanks, port)); });
    }
    trial->moment = Clock::now() + milliseconds(random_below(trial->seed, 1, spread_ms));
    trials.push_back(std::move(trial));
  }
  return trials;
}

void strike_all(std::vector<std::unique_ptr<Trial>>& trials, int signal) {
  for (size_t left = trials.size(); left > 0;) {
    for (auto& trial : trials) {
      if (trial->done || Clock::now() < trial->moment) continue;
      trial->ranks[trial->victim].send(signal);
      trial->done = true;
      --left;
    }
    std::this_thread::sleep_for(milliseconds(1));
  }
}

/// The victim is named, and nobody else is.
void expect_named(const ForkedRank::Result& result, const Trial& trial) {
  EXPECT_FALSE(result.timed_out) << trial.name();
  EXPECT_EQ(result.signal, 0) << trial.name();
  const std::string number = std::to_string(trial.victim);
  // "rank 3 cannot find rank 0 at ...", when rank 0 never listened.
  const size_t at = result.text.find("cannot find ");
  const std::string text = at == std::string::npos ? result.text : result.text.substr(at + 12);
  EXPECT_TRUE(text.starts_with("rank " + number + " ")) << trial.name() << ": " << result.text;
}

TEST(RendezvousFault, AKilledRankIsNamedByAllOthers) {
  for (uint64_t seed = 1; seed <= 192; seed += 16) {
    auto trials = start_trials(seed, 16, 250);
    strike_all(trials, SIGKILL);
    for (auto& trial : trials) {
      for (uint32_t rank = 0; rank < kRanks; ++rank) {
        const ForkedRank::Result result = trial->ranks[rank].wait(kBound);
        if (rank != trial->victim) {
          expect_named(result, *trial);
        } else {
          EXPECT_EQ(result.signal, SIGKILL) << trial->name() << ": " << result.text;
        }
      }
    }
    if (HasFailure()) return;
  }
}

TEST(RendezvousFault, AStoppedRankIsNamedByAllOthersAndLearnsOfIt) {
  for (uint64_t seed = 1001; seed <= 1080; seed += 16) {
    auto trials = start_trials(seed, 16, 250);
    strike_all(trials, SIGSTOP);
    for (auto& trial : trials) {
      for (uint32_t rank = 0; rank < kRanks; ++rank) {
        if (rank != trial->victim) expect_named(trial->ranks[rank].wait(kBound), *trial);
      }
    }
    for (auto& trial : trials) {
      ForkedRank& victim = trial->ranks[trial->victim];
      victim.send(SIGCONT);
      const ForkedRank::Result result = victim.wait(kBound);
      EXPECT_FALSE(result.timed_out) << trial->name();
      EXPECT_EQ(result.signal, 0) << trial->name();
      EXPECT_NE(result.text, "no failure") << trial->name();
      // Stopped while it joined, it may find rank 0 gone; afterwards it is told of itself.
      const bool joined = result.exit_code == 0;
      if (joined) expect_named(result, *trial);
    }
    if (HasFailure()) return;
  }
}

TEST(RendezvousFault, AShortStopIsNoFailure) {
  auto trials = start_trials(2001, 8, 1);
  std::this_thread::sleep_for(milliseconds(400));
  for (auto& trial : trials) trial->ranks[trial->victim].send(SIGSTOP);
  std::this_thread::sleep_for(kSilence / 2);
  for (auto& trial : trials) trial->ranks[trial->victim].send(SIGCONT);
  std::this_thread::sleep_for(kSilence * 2);
  for (auto& trial : trials) {
    for (ForkedRank& rank : trial->ranks) {
      EXPECT_EQ(waitpid(rank.process(), nullptr, WNOHANG), 0) << trial->name();
    }
  }
}

TEST(RendezvousFault, AHalfOpenConnectionDoesNotBlockTheJoin) {
  const uint16_t port = free_port();
  ForkedRank zero([&] { return wait_for_failure(rank_of(0, 2, port)); });
  std::vector<int> sockets;
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  while (sockets.size() < 20) {
    const int socket = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (connect(socket, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) {
      close(socket);
      std::this_thread::sleep_for(milliseconds(1));
      continue;
    }
    sockets.push_back(socket);
  }
  ForkedRank one([&] {
    Rendezvous rendezvous(rank_of(1, 2, port),
                          {.join_timeout = kJoin, .silence_timeout = kSilence, .config = "a: 1\n"});
    rendezvous.report_failure("done");
    return *rendezvous.failure(milliseconds(0));
  });
  EXPECT_TRUE(contains(one.wait(kBound).text, "): done"));
  EXPECT_TRUE(contains(zero.wait(kBound).text, "): done"));
  for (const int socket : sockets) close(socket);
}

TEST(RendezvousFault, DestructorsEndWhileOthersAreStopped) {
  for (const uint32_t stopped : {0u, 1u}) {
    const uint16_t port = free_port();
    const auto leave = [=](uint32_t rank) {
      auto rendezvous = std::make_unique<Rendezvous>(
          rank_of(rank, 2, port),
          Rendezvous::Options{
              .join_timeout = kJoin, .silence_timeout = milliseconds(60000), .config = ""});
      rendezvous->set(std::to_string(rank), "");
      rendezvous->get(std::to_string(1 - rank), milliseconds(1000));
      std::this_thread::sleep_for(milliseconds(100));  // the other's get shall be answered
      if (rank == stopped) raise(SIGSTOP);
      std::this_thread::sleep_for(milliseconds(200));
      const auto begin = Clock::now();
      rendezvous.reset();
      return Clock::now() - begin < milliseconds(4500) ? std::string("quick") : "slow";
    };
    ForkedRank zero([=] { return leave(0); }), one([=] { return leave(1); });
    EXPECT_EQ((stopped == 0 ? one : zero).wait(kBound).text, "quick");
  }
}

/// Two network namespaces joined by a cable.
class NetworkCut : public testing::Test {
 protected:
  void SetUp() override {
    const std::string a = "link add " + side('a') + " type veth peer name " + side('b');
    made_ = ip("netns add " + side('a')) && ip("netns add " + side('b')) && ip(a) &&
            join('a', "10.213.7.1/24") && join('b', "10.213.7.2/24");
    if (!made_) GTEST_SKIP() << "network namespaces are not permitted here, or ip is missing";
  }
  void TearDown() override {
    ip("netns del " + side('a'));
    ip("netns del " + side('b'));
  }
  std::string side(char letter) const { return fmt::format("ovs{}{}", letter, test_process_); }
  static bool ip(const std::string& words) {
    return system(("PATH=$PATH:/usr/sbin ip " + words + " >/dev/null 2>&1").c_str()) == 0;
  }
  bool join(char letter, const std::string& address) const {
    const std::string name = side(letter);
    return ip("link set " + name + " netns " + name) &&
           ip("-n " + name + " addr add " + address + " dev " + name) &&
           ip("-n " + name + " link set lo up") && ip("-n " + name + " link set " + name + " up");
  }
  ForkedRank start(uint32_t rank, char letter, uint16_t port) const {
    return ForkedRank([=, this] {
      const int space = open(("/var/run/netns/" + side(letter)).c_str(), O_RDONLY);
      if (setns(space, CLONE_NEWNET) != 0) return std::string("setns failed");
      RankIdentity identity = rank_of(rank, 3, port);
      identity.master_addr = "10.213.7.1";
      Rendezvous rendezvous(
          identity,
          {.join_timeout = milliseconds(5000), .silence_timeout = kSilence, .config = ""});
      rendezvous.set(std::to_string(rank), rendezvous.own_address());
      std::string text;
      for (const char* other : {"0", "1", "2"}) {
        text += rendezvous.get(other, milliseconds(5000)) + " ";
      }
      return text + rendezvous.failure(milliseconds(10000)).value_or("no failure");
    });
  }
  void cut_at(char letter) {
    const uint16_t port = free_port();
    ForkedRank zero = start(0, 'a', port), one = start(1, 'a', port), two = start(2, 'b', port);
    std::this_thread::sleep_for(milliseconds(600));
    EXPECT_TRUE(ip("-n " + side(letter) + " link set " + side(letter) + " down"));
    const std::string all = "10.213.7.1 10.213.7.1 10.213.7.2 ";
    EXPECT_TRUE(contains(zero.wait(kBound).text, all + "rank 2 (host "));
    EXPECT_TRUE(contains(one.wait(kBound).text, all + "rank 2 (host "));
    EXPECT_TRUE(contains(two.wait(kBound).text, all + "rank 0 (host "));
  }

 private:
  const pid_t test_process_ = getpid();
  bool made_ = false;
};

TEST_F(NetworkCut, NearRankZeroIsSeenOnBothSides) { cut_at('a'); }

TEST_F(NetworkCut, NearTheOtherIsSeenOnBothSides) { cut_at('b'); }

}  // namespace
}  // namespace overspill
