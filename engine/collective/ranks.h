// A run's ranks as one of them sees them: who it is, the collectives over its groups, and how it
// learns that another one is gone. One object a process; its collectives have one caller at a time.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "engine/base/error.h"
#include "engine/collective/collective.h"
#include "engine/collective/group.h"
#include "engine/collective/rendezvous.h"

namespace overspill {

struct GlooDevice;

/// `hybrid_shard: true`: the ranks of a host share one copy of the state.
inline constexpr uint32_t kGroupIsHost = UINT32_MAX;

class Ranks {
 public:
  struct Options {
    uint32_t zero_stage = 3;
    uint32_t hybrid_shard = 0;  ///< ranks that share one copy of the state; 0: all, or kGroupIsHost
    double timeout = 60;        ///< seconds without a sign of life
    std::string config;         ///< Rendezvous::Options::config
    /// When a rank is lost and this one does not end in order within seconds, the process ends:
    /// others must not wait for a thread of it that hangs. Not for a process that is another
    /// program's.
    bool last_resort = true;
  };
  /// The only rank.
  Ranks();
  /// Meets the others, if there are any. Throws Error(rank_lost).
  Ranks(const RankIdentity& identity, const Options& options);
  ~Ranks();

  /// With the places on the hosts as they are, whatever the launcher said.
  const RankIdentity& identity() const { return identity_; }
  uint32_t rank() const { return identity_.rank; }
  uint32_t size() const { return identity_.ranks; }
  bool first() const { return rank() == 0; }
  /// For little: what the ranks tell each other between steps. A model's data have the other
  /// groups.
  Collective& world() const { return *groups_.world; }
  const RankGroups& groups() const { return groups_; }
  /// By rank, a number for the host it runs on.
  const std::vector<uint64_t>& hosts() const { return hosts_; }

  /// The groups of the model's data once more, by another backend: `make` is called for each that
  /// has several ranks, in the same order everywhere. A lost rank ends their calls too.
  class DataGroups {
   public:
    using Make = std::function<std::unique_ptr<Collective>(const CollectiveGroup& group)>;
    DataGroups(const Ranks& ranks, const Make& make);
    ~DataGroups();
    const RankGroups& groups() const { return groups_; }

   private:
    explicit DataGroups(const Ranks& ranks);
    Collective* add(const CollectiveGroup& group, const Make& make);
    const Ranks& ranks_;
    RankGroups groups_;
    std::vector<std::unique_ptr<Collective>> collectives_;
  };

  /// Every rank's value, in rank order.
  template <class T>
  std::vector<T> gather(const T& value) const {
    static_assert(std::is_trivially_copyable_v<T>);
    return gather(std::span(&value, 1));
  }
  /// Every rank's values, as many of each.
  template <class T>
  std::vector<std::remove_const_t<T>> gather(std::span<T> values) const {
    std::vector<std::remove_const_t<T>> all(values.size() * size());
    world().all_gather(std::as_bytes(values), std::as_writable_bytes(std::span(all)));
    return all;
  }
  /// A text of the first rank, on every rank.
  std::string broadcast(const std::string& text) const;

  /// What to end with when `error` was thrown: the first failure of the run, where that is another
  /// one. The other ranks are told.
  Error cause(const Error& error) const;

 private:
  friend DataGroups;
  CollectiveGroup group(const std::string& name, uint32_t first, uint32_t stride,
                        uint32_t count) const;
  CollectiveGroup shard_group(const std::string& name) const;
  CollectiveGroup replicas_group(const std::string& name) const;
  void meet(const Options& options);
  void find_hosts();
  void end_waits(const std::string& what);

  RankIdentity identity_;
  std::vector<uint64_t> hosts_{0};
  std::unique_ptr<Rendezvous> rendezvous_;
  std::shared_ptr<GlooDevice> gloo_;
  std::vector<std::unique_ptr<Collective>> collectives_;
  RankGroups groups_;
  std::chrono::milliseconds timeout_{0};
  bool has_last_resort_ = true;
  uint32_t shard_size_ = 1;

  // The last resort: a process that does not end by itself after another rank's failure.
  mutable std::mutex mutex_;
  mutable std::vector<Collective*> others_;  ///< of DataGroups
  std::condition_variable ended_;
  std::optional<std::string> lost_;  ///< what ended the run
  bool closing_ = false;
  std::thread last_resort_;
};

/// Ranks that share one copy of the state: 1 for stage 0. Throws Error(invalid_config) where groups
/// do not divide the ranks.
uint32_t shard_group_size(uint32_t zero_stage, uint32_t hybrid_shard, const RankIdentity& rank);

}  // namespace overspill
