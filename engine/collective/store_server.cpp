// Rank 0's side of the rendezvous. Nothing a stranger sends counts before its proof of the token.
#include "engine/collective/store_server.h"

#include <boost/asio/ip/v6_only.hpp>
#include <boost/asio/post.hpp>

#include "engine/base/error.h"
#include "engine/base/log.h"
#include "engine/base/thread.h"
#include "engine/collective/join_checks.h"
#include "engine/collective/token_proof.h"

namespace overspill {
namespace {

namespace asio = boost::asio;
using asio::ip::tcp;
using boost::system::error_code;
using Clock = std::chrono::steady_clock;

constexpr size_t kMaxStrangers = 256;
constexpr uint32_t kMaxWarnings = 5;  ///< a port scanner must not fill the log
/// How long rank 0 stays for ranks that are not done yet, and then for its goodbye to arrive.
constexpr std::chrono::milliseconds kLinger{3000}, kFarewell{500};

bool all_loopback(const tcp::resolver::results_type& results) {
  for (const auto& entry : results) {
    if (!entry.endpoint().address().is_loopback()) return false;
  }
  return !results.empty();
}

}  // namespace

StoreServer::StoreServer(const RankIdentity& identity, const Rendezvous::Options& options,
                         const RankHello& hello)
    : options_(options),
      own_hello_(hello),
      token_(identity.token),
      place_(fmt::format("{}:{}", identity.master_addr, identity.master_port)),
      by_rank_(identity.ranks, nullptr) {
  listen(identity);
  accept();
  join_timer_.expires_after(options_.join_timeout);
  join_timer_.async_wait([this](const error_code& error) {
    if (error || complete_) return;
    heard_ = own_hello_.ranks;  // the others have had their time
    std::vector<uint32_t> missing;
    for (uint32_t rank = 0; rank < by_rank_.size(); ++rank) {
      if (by_rank_[rank] == nullptr) missing.push_back(rank);
    }
    fail_all(missing_ranks(missing, own_hello_.ranks, options_.join_timeout, place_));
  });
  tick();
  thread_ = std::thread([this] {
    set_thread_name("rendezvous-srv");
    io_.run();
  });
}

StoreServer::~StoreServer() {
  asio::post(io_, [this] {
    leave_at_ = Clock::now() + kLinger;
    leave();
  });
  thread_.join();
}

void StoreServer::listen(const RankIdentity& identity) {
  error_code error;
  tcp::resolver resolver(io_);
  const auto results = resolver.resolve(identity.master_addr, "", error);
  if (error) {
    fail(ErrorCode::rank_lost,
         "rank 0 cannot resolve MASTER_ADDR={}: {}; give rank 0's host name or "
         "address",
         identity.master_addr, error.message());
  }
  const bool alone = identity.ranks == 1;
  const uint16_t port = alone ? uint16_t{0} : identity.master_port;
  std::vector<tcp::endpoint> candidates;
  // Where all ranks are on this host, nobody else needs to reach the port.
  if (alone) {
    candidates.emplace_back(asio::ip::address_v4::loopback(), port);
  } else if (all_loopback(results)) {
    for (const auto& entry : results) candidates.emplace_back(entry.endpoint().address(), port);
  } else {
    // Any address: the host's own name often resolves to 127.0.1.1 here and only here.
    candidates = {{tcp::v6(), port}, {tcp::v4(), port}};
  }
  for (const tcp::endpoint& candidate : candidates) {
    if (try_listen(candidate, error)) return;
    if (error == asio::error::address_in_use) break;
  }
  if (error == asio::error::address_in_use) {
    fail(ErrorCode::rank_lost,
         "rank 0 cannot listen at {}: port {} is in use by another process; "
         "choose another MASTER_PORT for all ranks (or OVERSPILL_MASTER_PORT)",
         place_, port);
  }
  fail(ErrorCode::rank_lost,
       "rank 0 cannot listen at {}: {}; MASTER_ADDR must be an address of rank "
       "0's host",
       place_, error.message());
}

bool StoreServer::try_listen(const tcp::endpoint& endpoint, error_code& error) {
  error_code ignored;
  acceptor_.close(ignored);
  acceptor_.open(endpoint.protocol(), error);
  if (error) return false;
  close_on_exec(acceptor_.native_handle());
  acceptor_.set_option(tcp::acceptor::reuse_address(true), ignored);
  if (endpoint.address().is_v6()) acceptor_.set_option(asio::ip::v6_only(false), ignored);
  acceptor_.bind(endpoint, error);
  if (!error) acceptor_.listen(asio::socket_base::max_listen_connections, error);
  if (error) return false;
  own_endpoint_ = acceptor_.local_endpoint();
  if (!own_endpoint_.address().is_unspecified()) return true;
  if (endpoint.address().is_v4()) own_endpoint_.address(asio::ip::address_v4::loopback());
  // IPv4's loopback exists even where IPv6's is switched off.
  if (endpoint.address().is_v6()) {
    own_endpoint_ = {asio::ip::address_v4::loopback(), own_endpoint_.port()};
  }
  return true;
}

void StoreServer::accept() {
  accepting_ = true;
  acceptor_.async_accept([this](const error_code& error, tcp::socket socket) {
    accepting_ = false;
    // Out of descriptors, for example: tick() tries again.
    if (error) return;
    welcome(std::move(socket));
    accept();
  });
}

void StoreServer::welcome(tcp::socket socket) {
  sweep_strangers();
  Peer& peer = peers_.emplace_back();
  peer.connection = std::make_shared<FrameConnection>(std::move(socket));
  peer.nonce = random_bytes(kNonceBytes);
  peer.connection->start(
      [this, &peer](FrameKind kind, const std::string& body) { on_frame(peer, kind, body); },
      [this, &peer](ConnectionEnd, const std::string& why) { lose(peer, ": " + why); });
  peer.connection->send(FrameKind::challenge, FieldWriter().text(peer.nonce).take());
}

void StoreServer::on_frame(Peer& peer, FrameKind kind, const std::string& body) {
  if (kind == FrameKind::heartbeat) return;
  if (peer.stage == Stage::proof && kind == FrameKind::proof) return on_proof(peer, body);
  if (peer.stage == Stage::hello && kind == FrameKind::hello) return on_hello(peer, body);
  if (peer.stage == Stage::joined) return on_request(peer, kind, body);
  if (peer.stage != Stage::done) peer.connection->close();
}

void StoreServer::on_proof(Peer& peer, const std::string& body) {
  FieldReader fields(body);
  const std::string nonce = fields.text(), proof = fields.text();
  const bool right =
      fields.ok() && nonce.size() == kNonceBytes &&
      equal_in_constant_time(proof, hmac_sha256(token_, "client" + peer.nonce + nonce));
  if (!right) {
    if (warnings_++ < kMaxWarnings) {
      log_warning(
          "a process at {} tried to join with another token than this run's: a rank of "
          "another run, or a stranger; it was turned away",
          peer.connection->remote_address().to_string());
    }
    peer.connection->send(FrameKind::refused, {});
    peer.connection->finish();
    peer.stage = Stage::done;
    return;
  }
  peer.stage = Stage::hello;
  peer.connection->allow_large_frames();
  FieldWriter reply;
  reply.text(hmac_sha256(token_, "server" + peer.nonce + nonce));
  reply.text(own_hello_.host).number(own_hello_.process);
  peer.connection->send(FrameKind::welcome, reply.take());
}

void StoreServer::on_hello(Peer& peer, const std::string& body) {
  const bool readable = peer.hello.decode(body);
  ++heard_;
  // Another version may say other things of itself than this one understands.
  if (!readable && peer.hello.version == own_hello_.version) return peer.connection->close();
  auto reason = failure_ ? failure_ : misfit(own_hello_, peer.hello);
  if (!reason && by_rank_[peer.hello.rank] != nullptr) {
    const Peer& first = *by_rank_[peer.hello.rank];
    reason =
        Failure{ErrorCode::rank_lost,
                fmt::format("two processes are rank {}: process {} on host {} and process {} on "
                            "host {}; give every process a RANK of its own",
                            peer.hello.rank, first.hello.process, first.hello.host,
                            peer.hello.process, peer.hello.host)};
  }
  if (reason) {
    turn_away(peer, *reason);
    // A run that is under way goes on without the newcomer.
    if (!complete_) fail_all(*reason);
    return;
  }
  peer.stage = Stage::joined;
  by_rank_[peer.hello.rank] = &peer;
  join_when_complete();
}

void StoreServer::turn_away(Peer& peer, const Failure& failure) {
  peer.connection->send(FrameKind::failure, failure.encode());
  peer.connection->finish();
  peer.stage = Stage::done;
}

void StoreServer::join_when_complete() {
  for (const Peer* peer : by_rank_) {
    if (peer == nullptr) return;
  }
  complete_ = true;
  join_timer_.cancel();
  const std::string outward = outward_address();
  for (Peer* peer : by_rank_) {
    const auto address = peer->connection->remote_address();
    // A rank that came by the loopback is on rank 0's host, which others reach from outside.
    const bool inside = address.is_loopback() && !outward.empty();
    const std::string own = inside ? outward : address.to_string();
    peer->connection->send(FrameKind::joined, FieldWriter().text(own).take());
  }
}

/// The address of this host by which the first rank outside of the loopback came.
std::string StoreServer::outward_address() const {
  for (const Peer* peer : by_rank_) {
    const auto address = peer->connection->local_address();
    if (!address.is_loopback()) return address.to_string();
  }
  return {};
}

void StoreServer::on_request(Peer& peer, FrameKind kind, const std::string& body) {
  FieldReader fields(body);
  if (kind == FrameKind::set) {
    const std::string key = fields.text(), value = fields.text();
    values_[key] = value;
    const auto [first, last] = waiting_.equal_range(key);
    for (auto it = first; it != last; ++it) answer(*it->second.first, it->second.second, value);
    waiting_.erase(first, last);
  } else if (kind == FrameKind::get) {
    const uint32_t request = fields.number();
    const std::string key = fields.text();
    const auto found = values_.find(key);
    if (found != values_.end()) return answer(peer, request, found->second);
    waiting_.emplace(key, std::pair(&peer, request));
  } else if (kind == FrameKind::failure) {
    fail_all(Failure::decode(body));
  } else if (kind == FrameKind::goodbye) {
    peer.stage = Stage::done;
    peer.connection->finish();
  }
}

void StoreServer::answer(Peer& peer, uint32_t request, const std::string& value) {
  peer.connection->send(FrameKind::value, FieldWriter().number(request).text(value).take());
}

void StoreServer::lose(Peer& peer, const std::string& why) {
  const bool failed = peer.stage == Stage::joined;
  peer.stage = Stage::done;
  if (failed) fail_all({ErrorCode::rank_lost, peer.text() + why});
}

void StoreServer::fail_all(Failure failure) {
  // What comes after the first failure are its consequences.
  if (failure_) return;
  failure_ = std::move(failure);
  for (Peer& peer : peers_) {
    if (peer.hello.version.empty()) continue;
    peer.connection->send(FrameKind::failure, failure_->encode());
  }
}

void StoreServer::tick() {
  const uint32_t most = silent_ticks(options_.silence_timeout);
  for (Peer& peer : peers_) {
    if (peer.connection->closed() && peer.stage != Stage::joined) continue;
    if (!peer.connection->tick(most) || peer.stage != Stage::joined) continue;
    lose(peer, fmt::format(" has been silent for {}: it is stopped, overloaded or cut off",
                           seconds_text(options_.silence_timeout)));
    // What fail_all has written to it is there to be read, should it ever go on.
    peer.connection->finish();
  }
  sweep_strangers();
  if (!accepting_) accept();
  tick_timer_.expires_after(heartbeat_interval(options_.silence_timeout));
  tick_timer_.async_wait([this](const error_code& error) {
    if (!error) tick();
  });
}

/// Those who have not joined in time, or have been turned away. Never called by their own handlers.
void StoreServer::sweep_strangers() {
  const auto joined_once = [this](const Peer& peer) {
    return peer.hello.rank < by_rank_.size() && by_rank_[peer.hello.rank] == &peer;
  };
  const auto too_old = Clock::now() - kHandshakeTime;
  size_t strangers = 0;
  for (auto it = peers_.rbegin(); it != peers_.rend(); ++it) {
    if (joined_once(*it)) continue;
    if (it->since < too_old || ++strangers > kMaxStrangers) it->connection->close();
  }
  peers_.remove_if(
      [&](const Peer& peer) { return peer.connection->closed() && !joined_once(peer); });
}

/// Again and again, once the destructor has begun.
void StoreServer::leave() {
  bool there = failure_ && !complete_ && heard_ < own_hello_.ranks, connected = false;
  for (const Peer& peer : peers_) {
    there |= peer.stage == Stage::joined;
    connected |= !peer.hello.version.empty() && !peer.connection->closed();
  }
  if (!said_goodbye_ && (!there || Clock::now() > leave_at_)) {
    said_goodbye_ = true;
    leave_at_ = Clock::now() + kFarewell;
    for (Peer& peer : peers_) {
      peer.connection->send(FrameKind::goodbye, {});
      peer.connection->finish();
    }
  }
  if (said_goodbye_ && (!connected || Clock::now() > leave_at_)) return io_.stop();
  leave_timer_.expires_after(std::chrono::milliseconds(5));
  leave_timer_.async_wait([this](const error_code& error) {
    if (!error) leave();
  });
}

}  // namespace overspill
