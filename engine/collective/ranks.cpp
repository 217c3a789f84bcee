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
  const auto add = [&](const std::string& name, uint32_t first, uint32_t stride, uint32_t count) {
    auto made = make_group(name, first, stride, count, options);
    const std::lock_guard lock(mutex_);
    if (lost_) made->abort(*lost_);
    collectives_.push_back(std::move(made));
    return collectives_.back().get();
  };
  groups_.world = add("world", 0, 1, size());
  find_hosts();
  const uint32_t group = shard_group_size(options.zero_stage, options.hybrid_shard, identity_);
  const uint32_t copy = rank() / group, part = rank() % group;
  const auto host = hosts_.begin() + copy * group;
  const bool on_one_host = std::all_of(host, host + group, [&](uint64_t h) { return h == *host; });
  const std::vector<uint32_t> groups = gather(on_one_host ? group : 0);
  const bool alike = std::ranges::count(groups, group) == std::ssize(groups);
  if (options.hybrid_shard == kGroupIsHost && !alike) {
    fail(
        ErrorCode::invalid_config,
        "hybrid_shard: true shares the state among the ranks of a host, so every host must have as "
        "many, with numbers that follow each other; start them so (mpirun --map-by slot, srun "
        "--distribution=block), or set hybrid_shard to the size of a group");
  }
  groups_.shard = add(fmt::format("shard-{}", copy), copy * group, 1, group);
  groups_.replicas = add(fmt::format("replicas-{}", part), part, group, size() / group);
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

std::unique_ptr<Collective> Ranks::make_group(const std::string& name, uint32_t first,
                                              uint32_t stride, uint32_t count,
                                              const Options& options) {
  if (count == 1) return make_local_collective();
  const milliseconds timeout = milliseconds_of(options.timeout);
  CollectiveGroup group{.name = name, .rank = (identity_.rank - first) / stride, .size = count};
  for (uint32_t i = 0; i < count; ++i) group.members.push_back(first + i * stride);
  group.timeout = timeout;
  group.patience = std::max(timeout, kMostPatience);
  group.set = [this](const std::string& key, const std::string& value) {
    rendezvous_->set(key, value);
  };
  group.get = [this, timeout](const std::string& key) { return rendezvous_->get(key, timeout); };
  return make_gloo_collective(group, gloo_);
}

/// From the rendezvous' thread.
void Ranks::end_waits(const std::string& what) {
  const std::lock_guard lock(mutex_);
  lost_ = what;
  for (const auto& collective : collectives_) collective->abort(what);
  if (closing_) return;
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

Error Ranks::cause(const Error& error) {
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
