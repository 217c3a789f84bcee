// Runs of several ranks in one process: each has a thread, a Trainer and its own sockets, over the
// real rendezvous and Gloo.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <exception>
#include <thread>

#include "engine/collective/ranks.h"
#include "tests/fault/training_fixture.h"

namespace overspill::test {

/// A TCP port that nobody listens at now.
inline uint16_t free_port() {
  const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  EXPECT_EQ(::bind(fd, reinterpret_cast<sockaddr*>(&address), size), 0);
  EXPECT_EQ(::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size), 0);
  ::close(fd);
  return ntohs(address.sin_port);
}

/// What a run of several ranks leaves: the first rank's, and each rank's own.
struct RankedRun {
  FinishedRun run;
  std::vector<RunReport> reports;
  std::vector<uint64_t> bytes_sent;  ///< of the model's data, over the whole run
  std::vector<Layout> layouts;
};

class RanksTest : public TrainingTest {
 protected:
  /// Four sequences a step, whatever the number of ranks.
  TrainConfig ranked_config(uint32_t ranks, bool tied = false) const {
    TrainConfig config = tiny_config(tied);
    config.precision = Precision::float32;
    config.gradient_accumulation_steps = 4 / ranks;
    config.deterministic_reduction = true;
    config.reduce_dtype = ReduceType::float32;
    config.rank_timeout = 60;
    return config;
  }

  /// Throws what the first rank to fail threw.
  static RankedRun run_ranks(const TrainConfig& config, uint32_t ranks) {
    RankedRun result;
    result.reports.resize(ranks);
    result.bytes_sent.resize(ranks);
    result.layouts.resize(ranks);
    std::vector<std::exception_ptr> errors(ranks);
    const uint16_t port = free_port();
    testing::internal::CaptureStdout();
    {
      std::vector<std::jthread> threads;
      for (uint32_t rank = 0; rank < ranks; ++rank) {
        threads.emplace_back([&, rank] {
          try {
            run_rank(config, identity_of(rank, ranks, port), result);
          } catch (...) {
            errors[rank] = std::current_exception();
          }
        });
      }
    }
    testing::internal::GetCapturedStdout();
    rethrow_cause(errors);
    result.run.report = result.reports[0];
    result.run.lines = metrics_of(config.output_dir);
    result.run.checkpoint = files_in(result.reports[0].checkpoint);
    return result;
  }
  RankedRun run_ranks_fresh(TrainConfig config, uint32_t ranks) {
    config.output_dir = root_ / ("ranks-" + std::to_string(++runs_));
    RankedRun run = run_ranks(config, ranks);
    fs::remove_all(config.output_dir);
    return run;
  }

 private:
  static RankIdentity identity_of(uint32_t rank, uint32_t ranks, uint16_t port) {
    RankIdentity identity;
    identity.rank = identity.local_rank = rank;
    identity.ranks = identity.local_ranks = ranks;
    identity.master_port = port;
    identity.token = "test";
    return identity;
  }
  static void run_rank(const TrainConfig& config, const RankIdentity& identity,
                       RankedRun& result) {
    const std::atomic<bool> stop{false};
    Ranks ranks(identity, ranks_options(config, identity));
    try {
      Trainer trainer(config, ranks);
      result.reports[identity.rank] = trainer.run(stop);
      result.layouts[identity.rank] = trainer.setup().layout;
      result.bytes_sent[identity.rank] =
          ranks.groups().shard->bytes_sent() + ranks.groups().replicas->bytes_sent();
    } catch (const Error& error) {
      throw ranks.cause(error);
    }
  }
  static void rethrow_cause(const std::vector<std::exception_ptr>& errors) {
    std::exception_ptr consequence;
    for (const std::exception_ptr& error : errors) {
      if (!error) continue;
      try {
        std::rethrow_exception(error);
      } catch (const Error& e) {
        if (e.code() != ErrorCode::rank_lost) throw;
        consequence = error;
      }
    }
    if (consequence) std::rethrow_exception(consequence);
  }

  int runs_ = 0;
};

}  // namespace overspill::test
