// Groups, and the ends of waits.
#include "engine/collective/ranks.h"

#include <chrono>
#include <cstdlib>

#include "engine/base/log.h"
#include "engine/base/thread.h"
#include "engine/collective/gloo_collective.h"

namespace overspill {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kNewsDelay{3000};  // a failed rank's report may come behind its connection's

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
  CHECK(identity.ranks % options.shard_group == 0);
  rendezvous_ = std::make_unique<Rendezvous>(
      identity, Rendezvous::Options{.join_timeout = milliseconds_of(options.timeout),
                                    .silence_timeout = milliseconds_of(options.timeout / 2),
                                    .config = options.config});
  gloo_ = open_gloo_device(rendezvous_->own_address());
  const uint32_t ranks = identity.ranks, group = options.shard_group, rank = identity.rank;
  const auto add = [&](const std::string& name, uint32_t first, uint32_t stride, uint32_t count) {
    collectives_.push_back(make_group(name, first, stride, count, options));
    return collectives_.back().get();
  };
  groups_.world = add("world", 0, 1, ranks);
  const uint32_t copy = rank / group, part = rank % group;
  groups_.shard = add(fmt::format("shard-{}", copy), copy * group, 1, group);
  groups_.replicas = add(fmt::format("replicas-{}", part), part, group, ranks / group);
  rendezvous_->on_failure([this](const std::string& what) { end_waits(what); });
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
  group.set = [this](const std::string& key, const std::string& value) {
    rendezvous_->set(key, value);
  };
  group.get = [this, timeout](const std::string& key) { return rendezvous_->get(key, timeout); };
  return make_gloo_collective(group, gloo_);
}

/// From the rendezvous' thread.
void Ranks::end_waits(const std::string& what) {
  for (const auto& collective : collectives_) collective->abort(what);
  const std::lock_guard lock(mutex_);
  if (closing_) return;
  last_resort_ = std::thread([this, what] {
    set_thread_name("last_resort");
    constexpr auto kPatience = std::chrono::seconds(20);
    std::unique_lock wait(mutex_);
    if (ended_.wait_for(wait, kPatience, [this] { return closing_; })) return;
    write_log(LogLevel::error, fmt::format("{}; rank {} could not end in order", what, rank()));
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

uint32_t shard_group_size(uint32_t zero_stage, uint32_t hybrid_group, uint32_t ranks) {
  if (zero_stage == 0) return 1;
  if (hybrid_group == 0) return ranks;
  if (hybrid_group > ranks || ranks % hybrid_group != 0) {
    fail(ErrorCode::invalid_config,
         "hybrid_shard: groups of {} ranks do not divide the run's {} ranks; choose a divisor, or "
         "`hybrid_shard: false` to share one copy of the state among all",
         hybrid_group, ranks);
  }
  return hybrid_group;
}

}  // namespace overspill
