// Joining, the store, failures and goodbyes, with ranks as threads; each refusal by its text.
#include "engine/collective/rendezvous.h"

#include <gtest/gtest.h>

#include <atomic>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/write.hpp>
#include <thread>
#include <vector>

#include "engine/base/error.h"
#include "engine/base/log.h"
#include "engine/base/random.h"
#include "engine/collective/store_client.h"
#include "tests/fault/launch_fixture.h"

namespace overspill {
namespace {

using test::contains;
using test::milliseconds;
using Clock = std::chrono::steady_clock;
namespace asio = boost::asio;

RankIdentity rank_of(uint32_t rank, uint32_t ranks, uint16_t port) {
  return {.rank = rank,
          .ranks = ranks,
          .local_rank = rank,
          .local_ranks = ranks,
          .master_addr = "127.0.0.1",
          .master_port = port,
          .token = "secret-of-the-run",
          .launcher = "none"};
}

const Rendezvous::Options kQuick{
    .join_timeout = milliseconds(2000), .silence_timeout = milliseconds(2000), .config = "a: 1\n"};

Rendezvous::Options joins_within(int timeout_ms) {
  Rendezvous::Options options = kQuick;
  options.join_timeout = milliseconds(timeout_ms);
  return options;
}

/// Runs the body once a rank, each in a thread; what they threw, or empty texts.
std::vector<std::string> on_ranks(uint32_t ranks, const std::function<void(uint32_t)>& body) {
  std::vector<std::string> errors(ranks);
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (const Error& error) {
        errors[rank] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

/// The error of a rank alone.
std::string refusal(const RankIdentity& identity, const Rendezvous::Options& options,
                    ErrorCode code = ErrorCode::rank_lost) {
  try {
    const Rendezvous rendezvous(identity, options);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code);
    return error.what();
  }
  return {};
}

asio::ip::tcp::socket connect_to(asio::io_context& io, uint16_t port) {
  asio::ip::tcp::socket socket(io);
  const asio::ip::tcp::endpoint endpoint(asio::ip::address_v4::loopback(), port);
  boost::system::error_code error;
  do {
    socket.close(error);
    socket.connect(endpoint, error);
  } while (error);
  return socket;
}

TEST(Rendezvous, OneRankNeedsNoPort) {
  RankIdentity identity = rank_of(0, 1, test::free_port());
  asio::io_context io;
  const asio::ip::tcp::acceptor taken(io, {asio::ip::address_v4::loopback(), identity.master_port});
  Rendezvous rendezvous(identity, kQuick);
  rendezvous.set("key", "value");
  EXPECT_EQ(rendezvous.get("key", milliseconds(1000)), "value");
  EXPECT_EQ(rendezvous.own_address(), "127.0.0.1");
}

TEST(Rendezvous, EightRanksJoinInAnyOrderAndExchangeValues) {
  for (uint64_t seed = 0; seed < 10; ++seed) {
    const uint16_t port = test::free_port();
    const auto errors = on_ranks(8, [&](uint32_t rank) {
      std::this_thread::sleep_for(milliseconds(random_below(seed, rank, 60)));
      Rendezvous rendezvous(rank_of(rank, 8, port), kQuick);
      rendezvous.set("from " + std::to_string(rank), std::string(rank * 10000, 'x'));
      for (uint32_t other = 0; other < 8; ++other) {
        const std::string value =
            rendezvous.get("from " + std::to_string(other), milliseconds(5000));
        EXPECT_EQ(value.size(), other * 10000);
      }
      EXPECT_EQ(rendezvous.own_address(), "127.0.0.1");
      EXPECT_FALSE(rendezvous.failure(milliseconds(0)));
    });
    EXPECT_EQ(errors, std::vector<std::string>(8)) << "seed " << seed;
  }
}

TEST(Rendezvous, SpeaksIpv6) {
  const uint16_t port = test::free_port();
  const auto errors = on_ranks(2, [&](uint32_t rank) {
    RankIdentity identity = rank_of(rank, 2, port);
    identity.master_addr = "::1";
    const Rendezvous rendezvous(identity, kQuick);
    EXPECT_EQ(rendezvous.own_address(), "::1");
  });
  if (errors[0].find("cannot listen") != std::string::npos) GTEST_SKIP() << errors[0];
  EXPECT_EQ(errors, std::vector<std::string>(2));
}

TEST(Rendezvous, GetWaitsForSetOfManyThreads) {
  const uint16_t port = test::free_port();
  const auto errors = on_ranks(2, [&](uint32_t rank) {
    Rendezvous rendezvous(rank_of(rank, 2, port), kQuick);
    std::vector<std::thread> threads;
    for (uint32_t i = 0; i < 8; ++i) {
      threads.emplace_back([&, i] {
        const std::string key = std::to_string(i);
        std::this_thread::sleep_for(milliseconds(random_below(7, i + 8 * rank, 30)));
        rendezvous.set(key + "/" + std::to_string(rank), key);
        EXPECT_EQ(rendezvous.get(key + "/" + std::to_string(1 - rank), milliseconds(5000)), key);
      });
    }
    for (std::thread& thread : threads) thread.join();
  });
  EXPECT_EQ(errors, std::vector<std::string>(2));
}

TEST(Rendezvous, GetNamesTheKeyThatDoesNotCome) {
  Rendezvous rendezvous(rank_of(0, 1, 1), kQuick);
  try {
    rendezvous.get("address of 3", milliseconds(100));
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::rank_lost);
    EXPECT_TRUE(contains(error.what(), "\"address of 3\": it has not come within 0.1 s"));
  }
}

TEST(Rendezvous, GoodbyesAreNoFailures) {
  const uint16_t port = test::free_port();
  const auto errors = on_ranks(4, [&](uint32_t rank) {
    const Rendezvous rendezvous(rank_of(rank, 4, port), kQuick);
    EXPECT_EQ(rendezvous.failure(milliseconds(50 * (4 - rank))), std::nullopt) << rank;
  });
  EXPECT_EQ(errors, std::vector<std::string>(4));
}

TEST(Rendezvous, RankZeroMayLeaveFirst) {
  const uint16_t port = test::free_port();
  const auto errors = on_ranks(2, [&](uint32_t rank) {
    Rendezvous rendezvous(rank_of(rank, 2, port), kQuick);
    if (rank == 0) return rendezvous.set("last", "word");
    EXPECT_EQ(rendezvous.get("last", milliseconds(1000)), "word");
    EXPECT_EQ(rendezvous.failure(milliseconds(3500)), std::nullopt);
    rendezvous.get("more", milliseconds(10000));
  });
  EXPECT_EQ(errors[0], "");
  EXPECT_TRUE(contains(errors[1], "rank 0, which keeps it, has ended"));
}

TEST(Rendezvous, TheFirstFailureReachesAll) {
  const uint16_t port = test::free_port();
  std::atomic<int> calls = 0;
  const auto errors = on_ranks(4, [&](uint32_t rank) {
    Rendezvous rendezvous(rank_of(rank, 4, port), kQuick);
    std::atomic<bool> called = false;
    if (rank != 3) {
      rendezvous.on_failure([&](const std::string& what) {
        EXPECT_TRUE(contains(what, "rank 2 (host "));
        EXPECT_TRUE(contains(what, "): out of memory"));
        ++calls;
        called = true;
      });
    }
    if (rank == 2) rendezvous.report_failure("out of memory");
    const auto failure = rendezvous.failure(milliseconds(2000));
    ASSERT_TRUE(failure);
    EXPECT_TRUE(contains(*failure, "out of memory"));
    rendezvous.report_failure("a consequence");
    EXPECT_EQ(rendezvous.failure(milliseconds(20)), failure);
    // Known already: called at once.
    if (rank == 3) {
      bool at_once = false;
      rendezvous.on_failure([&](const std::string&) { at_once = true; });
      EXPECT_TRUE(at_once);
    }
    while (rank != 3 && !called) std::this_thread::yield();
    rendezvous.get("never set", milliseconds(5000));
  });
  EXPECT_EQ(calls, 3);
  for (const std::string& error : errors) {
    EXPECT_TRUE(contains(error, "out of memory"));
    EXPECT_EQ(error.find("never set"), std::string::npos) << "what it waited for is no news";
  }
}

TEST(Rendezvous, NamesThePortInUse) {
  const uint16_t port = test::free_port();
  asio::io_context io;
  const asio::ip::tcp::acceptor taken(io, {asio::ip::address_v4::loopback(), port});
  EXPECT_EQ(
      refusal(rank_of(0, 2, port), kQuick),
      fmt::format("rank 0 cannot listen at 127.0.0.1:{}: port {} is in use by another process; "
                  "choose another MASTER_PORT for all ranks (or OVERSPILL_MASTER_PORT)",
                  port, port));
}

TEST(Rendezvous, NamesTheAddressWhereNobodyListens) {
  const uint16_t port = test::free_port();
  EXPECT_TRUE(contains(refusal(rank_of(3, 4, port), joins_within(200)),
                       fmt::format("rank 3 cannot find rank 0 at 127.0.0.1:{} within 0.2 s: "
                                   "Connection refused",
                                   port)));
  RankIdentity nowhere = rank_of(1, 2, port);
  nowhere.master_addr = "no-such-host.invalid";
  EXPECT_TRUE(contains(refusal(nowhere, joins_within(200)), "no-such-host.invalid"));
}

TEST(Rendezvous, TurnsAwayWrongTokensAndLeaksNone) {
  set_log_level(LogLevel::off);
  const uint16_t port = test::free_port();
  const auto errors = on_ranks(3, [&](uint32_t rank) {
    RankIdentity identity = rank_of(rank % 2, 2, port);
    if (rank == 2) identity.rank = 1, identity.token = "of-another-run";
    const Rendezvous rendezvous(identity, kQuick);
    EXPECT_EQ(rendezvous.failure(milliseconds(100)), std::nullopt);
  });
  set_log_level(LogLevel::info);
  EXPECT_EQ(errors[0], "");
  EXPECT_EQ(errors[1], "");
  EXPECT_TRUE(contains(errors[2], "has another token: it is the rank 0 of another run"));
  EXPECT_FALSE(contains(errors[2], "of-another-run"));
  EXPECT_FALSE(contains(errors[2], "secret-of"));
}

TEST(Rendezvous, NamesAStrangerAtThePort) {
  const uint16_t port = test::free_port();
  asio::io_context io;
  asio::ip::tcp::acceptor acceptor(io, {asio::ip::address_v4::loopback(), port});
  std::thread stranger([&] {
    asio::ip::tcp::socket socket = acceptor.accept();
    asio::write(socket, asio::buffer(std::string("SSH-2.0-OpenSSH_9.2\r\n")));
    std::string received(4096, '\0');
    boost::system::error_code error;
    received.resize(socket.read_some(asio::buffer(received), error));
    EXPECT_EQ(received.find("secret"), std::string::npos);
  });
  EXPECT_TRUE(contains(refusal(rank_of(1, 2, port), kQuick), "is not overspill's rank 0"));
  stranger.join();
}

/// Rank 0 and a rank 1 that is changed: the text that both end with.
std::string misfit_text(const std::function<void(RankIdentity&, Rendezvous::Options&)>& change,
                        ErrorCode code) {
  const uint16_t port = test::free_port();
  const auto errors = on_ranks(2, [&](uint32_t rank) {
    RankIdentity identity = rank_of(rank, 2, port);
    Rendezvous::Options options = kQuick;
    if (rank == 1) change(identity, options);
    try {
      const Rendezvous rendezvous(identity, options);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), code) << rank;
      throw;
    }
  });
  EXPECT_EQ(errors[0], errors[1]);
  return errors[0];
}

TEST(Rendezvous, EveryRankLearnsOfAMisfit) {
  EXPECT_TRUE(
      contains(misfit_text([](auto& identity, auto&) { identity.ranks = 3; }, ErrorCode::rank_lost),
               "was started as one of 3 ranks, rank 0"));
  EXPECT_TRUE(contains(misfit_text([](auto&, auto& options) { options.config = "a: 2\n"; },
                                   ErrorCode::invalid_config),
                       "\"a: 2\" instead of \"a: 1\""));
}

TEST(Rendezvous, NamesTwoProcessesOfOneRank) {
  const uint16_t port = test::free_port();
  const auto errors = on_ranks(4, [&](uint32_t rank) {
    const Rendezvous rendezvous(rank_of(rank == 3 ? 2 : rank, 4, port), kQuick);
  });
  for (const std::string& error : errors) EXPECT_TRUE(contains(error, "two processes are rank 2"));
}

TEST(Rendezvous, NamesAnotherVersion) {
  const uint16_t port = test::free_port();
  const auto errors = on_ranks(2, [&](uint32_t rank) {
    const RankIdentity identity = rank_of(rank, 2, port);
    if (rank == 0) const Rendezvous rendezvous(identity, kQuick);
    if (rank == 0) return;
    const RankHello hello{
        .version = "99.1", .rank = 1, .ranks = 2, .host = "h", .config = "a: 1\n"};
    const StoreClient client(identity, kQuick, hello, std::nullopt);
  });
  EXPECT_EQ(errors[0], errors[1]);
  EXPECT_TRUE(contains(errors[0], "rank 1 (host h, process 0) runs overspill 99.1, rank 0"));
}

TEST(Rendezvous, EveryRankThatJoinedNamesTheMissing) {
  const uint16_t port = test::free_port();
  const auto errors = on_ranks(2, [&](uint32_t rank) {
    const Rendezvous rendezvous(rank_of(rank, 4, port), joins_within(300));
  });
  for (const std::string& error : errors) {
    EXPECT_TRUE(contains(
        error,
        fmt::format("ranks 2 and 3 of 4 have not joined within 0.3 s at 127.0.0.1:{}", port)));
  }
}

TEST(Rendezvous, GarbageNeitherCountsNorBlocks) {
  set_log_level(LogLevel::off);
  const uint16_t port = test::free_port();
  std::atomic<bool> done = false;
  std::thread stranger([&] {
    asio::io_context io;
    std::vector<asio::ip::tcp::socket> silent;
    for (uint64_t i = 0; !done && i < 400; ++i) {
      asio::ip::tcp::socket socket = connect_to(io, port);
      std::string garbage(random_below(1, i, 3000), '\0');
      for (size_t at = 0; at < garbage.size(); ++at) garbage[at] = char(random_bits(i, at));
      // Some begin like a frame, with every kind and any size.
      FieldWriter header;
      header.number(kFrameMagic).number(uint32_t(i / 3 % 12)).number(uint32_t(i * 37));
      if (i % 3 == 0) garbage = header.take() + garbage;
      boost::system::error_code error;
      if (i % 3 != 1) asio::write(socket, asio::buffer(garbage), error);
      if (i % 2 == 0) silent.push_back(std::move(socket));
    }
  });
  const auto errors = on_ranks(3, [&](uint32_t rank) {
    std::this_thread::sleep_for(milliseconds(100 * rank));
    Rendezvous rendezvous(rank_of(rank, 3, port), joins_within(5000));
    rendezvous.set(std::to_string(rank), "here");
    for (const char* other : {"0", "1", "2"}) rendezvous.get(other, milliseconds(2000));
    EXPECT_EQ(rendezvous.failure(milliseconds(50)), std::nullopt);
    if (rank == 0) done = true;
    if (rank == 0) stranger.join();
  });
  set_log_level(LogLevel::info);
  EXPECT_EQ(errors, std::vector<std::string>(3));
}

TEST(Rendezvous, ALateProcessDoesNotDisturbTheRun) {
  const uint16_t port = test::free_port();
  std::atomic<bool> tried = false;
  const auto errors = on_ranks(3, [&](uint32_t rank) {
    if (rank == 2) std::this_thread::sleep_for(milliseconds(200));
    try {
      const Rendezvous rendezvous(rank_of(rank % 2 + (rank == 2), 2, port), kQuick);
      while (!tried) std::this_thread::sleep_for(milliseconds(5));
      EXPECT_EQ(rendezvous.failure(milliseconds(50)), std::nullopt);
    } catch (const Error&) {
      tried = true;
      throw;
    }
  });
  EXPECT_EQ(errors[0], "");
  EXPECT_EQ(errors[1], "");
  EXPECT_TRUE(contains(errors[2], "two processes are rank 1"));
}

TEST(Rendezvous, DestructorsAreQuick) {
  const uint16_t port = test::free_port();
  on_ranks(4, [&](uint32_t rank) {
    auto rendezvous = std::make_unique<Rendezvous>(rank_of(rank, 4, port), kQuick);
    rendezvous->set(std::to_string(rank), "");
    for (const char* other : {"0", "1", "2", "3"}) rendezvous->get(other, milliseconds(2000));
    const auto begin = Clock::now();
    rendezvous.reset();
    EXPECT_LT(Clock::now() - begin, milliseconds(1000)) << rank;
  });
}

}  // namespace
}  // namespace overspill
