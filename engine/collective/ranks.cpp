// Groups, and the ends of waits.
#include "engine/collective/ranks.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <fstream>

#include "engine/base/thread.h"
#include "engine/collective/gloo_collective.h"
#include "engine/collective/rank_output.h"

namespace overspill {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kNewsDelay{3000};  // a failed rank's report may come behind its connection's
/// Before the launcher's grace is over: so that each rank says why it ends.
constexpr milliseconds kLastResort{5000};

/// A lost rank ends waits by the rendezvous' heartbeats. One that lives may load or save for long;
/// this bounds what no heartbeat shows.
constexpr milliseconds kMostPatience{3600 * 1000};

std::string boot_id() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  std::getline(file, id);
  return id;
}

milliseconds milliseconds_of(double seconds) {
  return milliseconds(static_cast<int64_t>(seconds * 1000));
}

}  // namespace

Ranks::Ranks() {
  collectives_.push_back(make_local_collective());
  Collective* only = collectives_[0].get();
  groups_ = {only, only, only};
}

Ranks::Ranks(const RankIdentity& identity, const Options& options) : Ranks() {
  if (identity.ranks == 1) return;
  identity_ = identity;
  has_last_resort_ = options.last_resort;
  collectives_.clear();
  rendezvous_ = std::make_unique<Rendezvous>(
      identity, Rendezvous::Options{.join_timeout = milliseconds_of(options.timeout),
                                    .silence_timeout = milliseconds_of(options.timeout / 2),
                                    .config = options.config});
  rendezvous_->on_failure([this](const std::string& what) { end_waits(what); });
  try {
    meet(options);
  } catch (const Error& error) {
    throw cause(error);  // the others wait for this rank
  }
}

void Ranks::meet(const Options& options) {
  gloo_ = open_gloo_device(rendezvous_->own_address());
  timeout_ = milliseconds_of(options.timeout);
  const auto add = [&](const CollectiveGroup& group) {
    auto made = group.size == 1 ? make_local_collective() : make_gloo_collective(group, gloo_);
    const std::lock_guard lock(mutex_);
    if (lost_) made->abort(*lost_);
    collectives_.push_back(std::move(made));
    return collectives_.back().get();
  };
  groups_.world = add(group("world", 0, 1, size()));
  find_hosts();
  shard_size_ = shard_group_size(options.zero_stage, options.hybrid_shard, identity_);
  const auto host = hosts_.begin() + rank() / shard_size_ * shard_size_;
  const bool on_one_host =
      std::all_of(host, host + shard_size_, [&](uint64_t h) { return h == *host; });
  const std::vector<uint32_t> sizes = gather(on_one_host ? shard_size_ : 0);
  const bool alike = std::ranges::count(sizes, shard_size_) == std::ssize(sizes);
  if (options.hybrid_shard == kGroupIsHost && !alike) {
    fail(
        ErrorCode::invalid_config,
        "hybrid_shard: true shares the state among the ranks of a host, so every host must have as "
        "many, with numbers that follow each other; start them so (mpirun --map-by slot, srun "
        "--distribution=block), or set hybrid_shard to the size of a group");
  }
  groups_.shard = add(shard_group("shard"));
  groups_.replicas = add(replicas_group("replicas"));
}

CollectiveGroup Ranks::shard_group(const std::string& name) const {
  const uint32_t copy = rank() / shard_size_;
  return group(fmt::format("{}-{}", name, copy), copy * shard_size_, 1, shard_size_);
}

CollectiveGroup Ranks::replicas_group(const std::string& name) const {
  const uint32_t part = rank() % shard_size_;
  return group(fmt::format("{}-{}", name, part), part, shard_size_, size() / shard_size_);
}

/// Launchers do not always say who runs where.
void Ranks::find_hosts() {
  char name[256] = {};
  ::gethostname(name, sizeof name - 1);
  // Containers may share a name, and hosts a boot.
  const std::string own = fmt::format("{} {}", name, boot_id());
  hosts_ = gather(std::hash<std::string>()(own));
  identity_.local_rank = identity_.local_ranks = 0;
  for (uint32_t other = 0; other < size(); ++other) {
    if (hosts_[other] != hosts_[rank()]) continue;
    identity_.local_rank += other < rank();
    ++identity_.local_ranks;
  }
}

Ranks::~Ranks() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  ended_.notify_all();
  rendezvous_.reset();  // no callback comes after this
  if (last_resort_.joinable()) last_resort_.join();
}

CollectiveGroup Ranks::group(const std::string& name, uint32_t first, uint32_t stride,
                             uint32_t count) const {
  CollectiveGroup made{.name = name, .rank = (rank() - first) / stride, .size = count};
  for (uint32_t i = 0; i < count; ++i) made.members.push_back(first + i * stride);
  made.timeout = timeout_;
  made.patience = std::max(timeout_, kMostPatience);
  made.set = [this](const std::string& key, const std::string& value) {
    rendezvous_->set(key, value);
  };
  made.get = [this](const std::string& key) { return rendezvous_->get(key, timeout_); };
  return made;
}

Ranks::DataGroups::DataGroups(const Ranks& ranks) : ranks_(ranks), groups_(ranks.groups()) {}

/// The object is complete before its groups are made: when one fails, the destructor takes those
/// before it off the run's list.
Ranks::DataGroups::DataGroups(const Ranks& ranks, const Make& make) : DataGroups(ranks) {
  if (ranks.size() == 1) return;
  groups_.shard = add(ranks.shard_group("data-shard"), make);
  groups_.replicas = add(ranks.replicas_group("data-replicas"), make);
}

Collective* Ranks::DataGroups::add(const CollectiveGroup& group, const Make& make) {
  collectives_.push_back(group.size == 1 ? make_local_collective() : make(group));
  Collective* const made = collectives_.back().get();
  const std::lock_guard lock(ranks_.mutex_);
  if (ranks_.lost_) made->abort(*ranks_.lost_);
  ranks_.others_.push_back(made);
  return made;
}

Ranks::DataGroups::~DataGroups() {
  const std::lock_guard lock(ranks_.mutex_);
  for (const auto& collective : collectives_) std::erase(ranks_.others_, collective.get());
}

/// From the rendezvous' thread.
void Ranks::end_waits(const std::string& what) {
  const std::lock_guard lock(mutex_);
  lost_ = what;
  for (const auto& collective : collectives_) collective->abort(what);
  for (Collective* const collective : others_) collective->abort(what);
  if (closing_ || !has_last_resort_) return;
  last_resort_ = std::thread([this, what] {
    set_thread_name("last_resort");
    std::unique_lock wait(mutex_);
    if (ended_.wait_for(wait, kLastResort, [this] { return closing_; })) return;
    // As the command ends: its launcher must not take this rank for the first cause.
    const std::string line = fmt::format("overspill: {}: {}; rank {} could not end in order\n",
                                         error_code_name(ErrorCode::rank_lost), what, rank());
    write_to_standard_error(line);
    std::_Exit(1);
  });
}

std::string Ranks::broadcast(const std::string& text) const {
  uint64_t size = text.size();
  world().broadcast(std::as_writable_bytes(std::span(&size, 1)), 0);
  std::string result = text;
  result.resize(size);
  world().broadcast(std::as_writable_bytes(std::span(result)), 0);
  return result;
}

Error Ranks::cause(const Error& error) const {
  if (!rendezvous_) return error;
  if (error.code() != ErrorCode::rank_lost) {
    rendezvous_->report_failure(fmt::format("{}: {}", error_code_name(error.code()), error.what()));
    return error;
  }
  const std::optional<std::string> first = rendezvous_->failure(kNewsDelay);
  if (!first) rendezvous_->report_failure(error.what());
  return Error(ErrorCode::rank_lost, first.value_or(error.what()));
}

uint32_t shard_group_size(uint32_t zero_stage, uint32_t hybrid_shard, const RankIdentity& rank) {
  if (zero_stage == 0) return 1;
  if (hybrid_shard == 0) return rank.ranks;
  const uint32_t group = hybrid_shard == kGroupIsHost ? rank.local_ranks : hybrid_shard;
  if (group > rank.ranks || rank.ranks % group != 0) {
    fail(ErrorCode::invalid_config,
         "hybrid_shard: groups of {} ranks do not divide the run's {} ranks; choose a divisor, or "
         "`hybrid_shard: false` to share one copy of the state among all",
         group, rank.ranks);
  }
  return group;
}

}  // namespace overspill
