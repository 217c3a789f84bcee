// How the ranks of a run find each other and learn of each other's end: a key-value store that rank
// 0 serves at MASTER_ADDR:MASTER_PORT, over one connection a rank that stays open with heartbeats.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

namespace overspill {

/// This process among the ranks of the run.
struct RankIdentity {
  uint32_t rank = 0, ranks = 1;
  uint32_t local_rank = 0, local_ranks = 1;  ///< on this host
  std::string master_addr = "127.0.0.1";
  uint16_t master_port = 29500;
  std::string token;     ///< ranks with another one cannot join
  std::string launcher;  ///< "overspill", "torchrun", "Open MPI", "Slurm", "none": for messages
};

/// From the environment that overspill's launcher, torchrun, Open MPI or Slurm (srun) leave; one
/// rank where there is none. MASTER_ADDR and MASTER_PORT go before what is derived from the job,
/// OVERSPILL_MASTER_PORT before both; OVERSPILL_TOKEN before a token derived from the job's name.
/// Throws Error(invalid_config) naming the variable, its value and what to set.
RankIdentity rank_from_environment();

class Rendezvous {
 public:
  struct Options {
    std::chrono::milliseconds join_timeout{60000};     ///< for all ranks to be there
    std::chrono::milliseconds silence_timeout{30000};  ///< a rank without a heartbeat is lost
    /// Must be the same on all ranks ("key: value" lines); the first line that differs is named.
    std::string config;
  };
  /// Rank 0 serves and joins, the others join. Returns when all ranks are there. Throws
  /// Error(rank_lost): the port is in use, rank 0 is not found, a wrong token, version or number of
  /// ranks, a rank number taken twice, or ranks missing after join_timeout (which ones); and
  /// Error(invalid_config): another config. One rank alone needs no port.
  Rendezvous(const RankIdentity& identity, const Options& options);
  /// Says goodbye; the end of this rank is then no failure to others. Takes a second at most; rank
  /// 0 goes on serving until the others are done, for a few seconds at most.
  ~Rendezvous();
  Rendezvous(const Rendezvous&) = delete;
  Rendezvous& operator=(const Rendezvous&) = delete;

  const RankIdentity& identity() const;
  /// The address by which other ranks reach this host: a loopback address only when all ranks
  /// came by it.
  std::string own_address() const;

  /// Replaces an earlier value; key and value are at most 16 MiB. Does not wait. Throws
  /// Error(rank_lost) once a rank is lost.
  void set(const std::string& key, const std::string& value);
  /// Waits until the key is set. Throws Error(rank_lost) naming the key after the timeout, or the
  /// lost rank when one is lost meanwhile.
  std::string get(const std::string& key, std::chrono::milliseconds timeout);

  /// Called once, from another thread, when a rank is lost or fails: its number, host, process and
  /// what is known of why. At once where that has happened already. The callback must not throw,
  /// wait for this object or destroy it; a later one takes an earlier one's place.
  void on_failure(std::function<void(const std::string& what)> callback);
  /// The first failure, if there is any within the time.
  std::optional<std::string> failure(std::chrono::milliseconds wait) const;
  /// Tells the others that this rank ends with an error, and waits a second at most until rank 0
  /// knows. Without effect once there is a failure: the first one counts.
  void report_failure(const std::string& what);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace overspill
