// A run of several ranks in one process: each has a thread, a Trainer and its own sockets, over the
// real rendezvous and Gloo.
#pragma once

#include <gtest/gtest.h>

#include <exception>
#include <functional>
#include <thread>
#include <vector>

#include "engine/collective/ranks.h"
#include "engine/train/rank_setup.h"
#include "engine/train/trainer.h"
#include "tests/fault/launch_fixture.h"

namespace overspill::test {

/// What each rank leaves.
struct RankResult {
  RunReport report;
  uint64_t bytes_sent = 0;  ///< of the model's data, over the whole run
  Layout layout;
  std::exception_ptr error;
};

inline void run_rank(const TrainConfig& config, const RankIdentity& identity, RankResult& result) {
  const std::atomic<bool> stop{false};
  Ranks ranks(identity, ranks_options(config));
  try {
    Trainer trainer(config, ranks);
    result.report = trainer.run(stop);
    result.layout = trainer.setup().layout;
    result.bytes_sent =
        trainer.groups().shard->bytes_sent() + trainer.groups().replicas->bytes_sent();
  } catch (const Error& error) {
    throw ranks.cause(error);
  }
}

/// The error that is no consequence of another rank's, if there is any.
inline void rethrow_cause(const std::vector<RankResult>& results) {
  std::exception_ptr consequence;
  for (const RankResult& result : results) {
    if (!result.error) continue;
    try {
      std::rethrow_exception(result.error);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::rank_lost) throw;
      consequence = result.error;
    }
  }
  if (consequence) std::rethrow_exception(consequence);
}

/// A rank's own configuration, made of the one that all have.
using OwnConfig = std::function<TrainConfig(TrainConfig config, uint32_t rank)>;

/// What each rank leaves, its error included.
inline std::vector<RankResult> end_ranks(const TrainConfig& config, uint32_t ranks,
                                         const OwnConfig& own = {}) {
  std::vector<RankResult> results(ranks);
  const uint16_t port = free_port();
  testing::internal::CaptureStdout();
  {
    std::vector<std::jthread> threads;
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      threads.emplace_back([&, rank] {
        RankIdentity identity;
        identity.rank = identity.local_rank = rank;
        identity.ranks = identity.local_ranks = ranks;
        identity.master_port = port;
        identity.token = "test";
        try {
          run_rank(own ? own(config, rank) : config, identity, results[rank]);
        } catch (...) {
          results[rank].error = std::current_exception();
        }
      });
    }
  }
  testing::internal::GetCapturedStdout();
  return results;
}

/// Throws what the first rank to fail threw.
inline std::vector<RankResult> run_ranks(const TrainConfig& config, uint32_t ranks) {
  std::vector<RankResult> results = end_ranks(config, ranks);
  rethrow_cause(results);
  return results;
}

}  // namespace overspill::test
