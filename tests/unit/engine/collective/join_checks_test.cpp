// Who may join, the texts that say why not, and messages that are cut short.
#include "engine/collective/join_checks.h"

#include <gtest/gtest.h>

namespace overspill {
namespace {

RankHello hello(uint32_t rank) {
  return {.version = "1.2.0",
          .rank = rank,
          .ranks = 4,
          .host = rank == 0 ? "node1" : "node2",
          .process = 100 + rank,
          .config = "lr: 1\nsteps: 5\n"};
}

TEST(JoinChecks, LetsAnEqualRankIn) { EXPECT_FALSE(misfit(hello(0), hello(3))); }

TEST(JoinChecks, NamesBothVersions) {
  RankHello theirs = hello(2);
  theirs.version = "1.3.0";
  EXPECT_EQ(
      misfit(hello(0), theirs)->what,
      "rank 2 (host node2, process 102) runs overspill 1.3.0, rank 0 (host node1, process 100) "
      "runs overspill 1.2.0; install the same version on all hosts");
}

TEST(JoinChecks, NamesBothNumbersOfRanks) {
  RankHello theirs = hello(2);
  theirs.ranks = 8;
  EXPECT_EQ(misfit(hello(0), theirs)->what,
            "rank 2 (host node2, process 102) was started as one of 8 ranks, rank 0 (host node1, "
            "process 100) as one of 4; start all with the same number (WORLD_SIZE)");
}

TEST(JoinChecks, NamesTheFirstLineOfTheConfigurationThatDiffers) {
  RankHello theirs = hello(1);
  theirs.config = "lr: 1\nsteps: 6\nseed: 1\n";
  const Failure failure = *misfit(hello(0), theirs);
  EXPECT_EQ(failure.code, ErrorCode::invalid_config);
  EXPECT_EQ(failure.what,
            "rank 1 (host node2, process 101) has another configuration than rank 0 (host node1, "
            "process 100): \"steps: 6\" instead of \"steps: 5\"; start all ranks with the same "
            "configuration");
  theirs.config = "lr: 1\nsteps: 5\nseed: 1\n";
  EXPECT_NE(misfit(hello(0), theirs)->what.find("\"seed: 1\" instead of nothing"),
            std::string::npos);
  theirs.config = "lr: 1\n";
  EXPECT_NE(misfit(hello(0), theirs)->what.find("nothing instead of \"steps: 5\""),
            std::string::npos);
}

TEST(JoinChecks, NamesMissingRanks) {
  const auto text = [](std::vector<uint32_t> missing, uint32_t ranks) {
    const std::string what = missing_ranks(missing, ranks, std::chrono::seconds(60), "a:1").what;
    return what.substr(0, what.find(';'));
  };
  EXPECT_EQ(text({2}, 4), "rank 2 of 4 has not joined within 60 s at a:1");
  EXPECT_EQ(text({2, 3}, 4), "ranks 2 and 3 of 4 have not joined within 60 s at a:1");
  EXPECT_EQ(text({1, 2, 3}, 4), "ranks 1, 2 and 3 of 4 have not joined within 60 s at a:1");
  std::vector<uint32_t> many(100);
  for (uint32_t i = 0; i < many.size(); ++i) many[i] = i + 1;
  EXPECT_NE(text(many, 101).find("15, 16 and 84 more of 101"), std::string::npos);
}

TEST(StoreProtocol, RefusesEveryTruncatedHello) {
  const std::string body = hello(3).encode();
  RankHello read;
  ASSERT_TRUE(read.decode(body));
  EXPECT_EQ(read.config, hello(3).config);
  EXPECT_EQ(read.process, 103u);
  for (size_t size = 0; size < body.size(); ++size) {
    EXPECT_FALSE(RankHello().decode(std::string_view(body).substr(0, size))) << size;
  }
}

TEST(StoreProtocol, CarriesFailures) {
  const Failure failure = Failure::decode(Failure{ErrorCode::invalid_config, "x: 1"}.encode());
  EXPECT_EQ(failure.code, ErrorCode::invalid_config);
  EXPECT_EQ(failure.what, "x: 1");
  EXPECT_EQ(Failure::decode("").code, ErrorCode::rank_lost);
}

}  // namespace
}  // namespace overspill
