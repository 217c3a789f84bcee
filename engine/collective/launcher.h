// Starts the ranks of a run on this host, one process each, and sees all of them to their end.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace overspill {

struct LaunchOptions {
  uint32_t ranks = 1;
  std::vector<std::string> command;  ///< program and arguments, the same for every rank
  /// After a rank has failed, for the others to end by themselves; then they are killed.
  std::chrono::milliseconds grace{10000};
  /// After a rank has ended well, for the others to do so before the grace begins: they end
  /// together, so one that hangs or is stopped then is missed by nobody else.
  std::chrono::milliseconds patience{60000};
};

/// Runs the command once a rank, with RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR,
/// MASTER_PORT, OVERSPILL_TOKEN and OVERSPILL_LAUNCHER=overspill in its environment, and returns
/// when all have ended: 0, or the exit code of the rank that failed first (128 + its signal), named
/// in one line on stderr; 130 when the run was interrupted.
///
/// Rank 0 writes to this process's stdout; all else goes line by line to stderr with the rank in
/// front. SIGINT, SIGTERM and SIGHUP are passed on once; a second one kills the ranks. They get
/// SIGTERM when this process dies. To be called while the process has one thread. Throws Error(io)
/// when the ranks cannot be started; none is left then.
int launch_ranks(const LaunchOptions& options);

}  // namespace overspill
