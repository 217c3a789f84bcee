// The groups that ranks make over another backend, and how a failure reaches them.
#include "engine/collective/ranks.h"

#include <gtest/gtest.h>

#include <barrier>
#include <thread>
#include <vector>

#include "engine/base/error.h"
#include "tests/fault/launch_fixture.h"

namespace overspill {
namespace {

/// Runs the body as every rank at once, each a thread; what it threw, by rank.
template <class Body>
std::vector<std::string> run_as_ranks(uint32_t count, const Ranks::Options& options,
                                      const Body& body) {
  const uint16_t port = test::free_port();
  std::vector<std::string> errors(count);
  std::vector<std::jthread> threads;
  for (uint32_t rank = 0; rank < count; ++rank) {
    threads.emplace_back([&, rank] {
      RankIdentity identity;
      identity.rank = identity.local_rank = rank;
      identity.ranks = identity.local_ranks = count;
      identity.master_port = port;
      identity.token = "test";
      Ranks ranks(identity, options);
      try {
        body(ranks);
      } catch (const Error& error) {
        errors[rank] = ranks.cause(error).what();
      }
    });
  }
  threads.clear();
  return errors;
}

TEST(Ranks, AGroupThatCannotBeMadeLeavesNoneBeforeItToAbort) {
  // Each rank is a shard group of its own, then the group of replicas fails.
  std::barrier both_failed(2);
  const auto errors = run_as_ranks(2, {.zero_stage = 0, .config = {}}, [&](const Ranks& ranks) {
    const auto make = [](const CollectiveGroup& group) -> std::unique_ptr<Collective> {
      fail(ErrorCode::not_found, "no library for {}", group.name);
    };
    try {
      const Ranks::DataGroups groups(ranks, make);
    } catch (const Error&) {
      both_failed.arrive_and_wait();
      throw;
    }
  });
  // Each rank's failure ends the other's waits: it must find no group there that is gone.
  EXPECT_EQ(errors, std::vector<std::string>(2, "no library for data-replicas-0"));
}

}  // namespace
}  // namespace overspill
