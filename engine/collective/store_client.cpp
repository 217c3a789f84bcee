// A rank's side of the rendezvous after joining: requests and failures. See store_join.cpp.
#include "engine/collective/store_client.h"

#include <boost/asio/post.hpp>

#include "engine/base/error.h"
#include "engine/base/thread.h"

namespace overspill {
namespace {

namespace asio = boost::asio;
using boost::system::error_code;

/// How long a goodbye or a report may take to be heard.
constexpr std::chrono::milliseconds kFarewell{1000};

}  // namespace

StoreClient::StoreClient(const RankIdentity& identity, const Rendezvous::Options& options,
                         const RankHello& hello, std::optional<asio::ip::tcp::endpoint> endpoint)
    : options_(options),
      hello_(hello),
      token_(identity.token),
      master_addr_(identity.master_addr),
      place_(fmt::format("{}:{}", identity.master_addr, identity.master_port)),
      master_port_(identity.master_port),
      endpoint_(endpoint) {
  join(Clock::now() + options_.join_timeout);
  thread_ = std::thread([this] {
    set_thread_name("rendezvous");
    io_.restart();
    io_.run();
  });
}

StoreClient::~StoreClient() {
  asio::post(io_, [this] {
    leaving_ = true;
    connection_->send(FrameKind::goodbye, {});
    connection_->finish();
  });
  {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, kFarewell, [this] { return ended_; });
  }
  io_.stop();
  thread_.join();
}

void StoreClient::on_frame(FrameKind kind, const std::string& body) {
  FieldReader fields(body);
  switch (kind) {
    case FrameKind::challenge: return on_challenge(body);
    case FrameKind::welcome: return on_welcome(body);
    case FrameKind::refused:
      refusal_ = fmt::format(
          "rank 0 at {} has another token: it is the rank 0 of another run, or a "
          "stranger; choose another MASTER_PORT, or set the same OVERSPILL_TOKEN "
          "for all ranks",
          place_);
      return connection_->close();
    case FrameKind::joined:
      own_address_ = fields.text();
      joined_ = true;
      return;
    case FrameKind::failure: return fail_with(Failure::decode(body));
    case FrameKind::goodbye: {
      const std::lock_guard lock(mutex_);
      server_done_ = true;
      break;
    }
    case FrameKind::value: {
      const uint32_t request = fields.number();
      const std::lock_guard lock(mutex_);
      const auto waiting = replies_.find(request);
      if (waiting != replies_.end()) waiting->second = fields.text();
      break;
    }
    default: return;
  }
  changed_.notify_all();
}

void StoreClient::on_end(ConnectionEnd, const std::string& why) {
  bool expected = false;
  {
    const std::lock_guard lock(mutex_);
    ended_ = true;
    expected = server_done_ || leaving_;
  }
  changed_.notify_all();
  if (welcomed_ && !expected) {
    fail_with({ErrorCode::rank_lost, fmt::format("{}: {}", server_text(), why)});
  }
}

void StoreClient::tick() {
  tick_timer_.expires_after(heartbeat_interval(options_.silence_timeout));
  tick_timer_.async_wait([this](const error_code& error) {
    if (!error) tick();
  });
  if (!connection_->tick(silent_ticks(options_.silence_timeout))) return;
  if (connection_->closed()) return;
  const Failure failure{
      ErrorCode::rank_lost,
      fmt::format("{} has been silent for {}: it is stopped, overloaded or cut off", server_text(),
                  seconds_text(options_.silence_timeout))};
  fail_with(failure);
  // Rank 0 shall read this first, should it ever go on.
  connection_->send(FrameKind::failure, failure.encode());
  connection_->close();
  {
    const std::lock_guard lock(mutex_);
    ended_ = true;
  }
  changed_.notify_all();
}

void StoreClient::fail_with(const Failure& failure) {
  std::function<void(const std::string&)> callback;
  {
    const std::lock_guard lock(mutex_);
    if (failure_) return;
    failure_ = failure;
    callback = std::exchange(callback_, nullptr);
  }
  changed_.notify_all();
  if (callback) callback(failure.what);
}

void StoreClient::send(FrameKind kind, std::string body) {
  asio::post(io_, [this, kind, body = std::move(body)] { connection_->send(kind, body); });
}

void StoreClient::throw_if_over(const std::string& action) const {
  if (failure_) throw Error(ErrorCode::rank_lost, failure_->what);
  if (server_done_) fail(ErrorCode::rank_lost, "{}: rank 0, which keeps it, has ended", action);
}

void StoreClient::set(const std::string& key, const std::string& value) {
  CHECK(key.size() + value.size() + 8 <= kMaxBodyBytes);
  {
    const std::lock_guard lock(mutex_);
    throw_if_over(fmt::format("set \"{}\" for other ranks", key));
  }
  send(FrameKind::set, FieldWriter().text(key).text(value).take());
}

std::string StoreClient::get(const std::string& key, std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  const uint32_t request = next_request_++;
  const auto reply = replies_.emplace(request, std::nullopt).first;
  send(FrameKind::get, FieldWriter().number(request).text(key).take());
  const bool known =
      changed_.wait_for(lock, timeout, [&] { return reply->second || failure_ || server_done_; });
  const std::optional<std::string> value = std::move(reply->second);
  replies_.erase(reply);
  if (value) return *value;
  const std::string action = fmt::format("wait for another rank's \"{}\"", key);
  if (known) throw_if_over(action);
  fail(ErrorCode::rank_lost,
       "{}: it has not come within {}; a rank has failed before it, or is far behind", action,
       seconds_text(timeout));
}

void StoreClient::on_failure(std::function<void(const std::string& what)> callback) {
  std::optional<Failure> known;
  {
    const std::lock_guard lock(mutex_);
    known = failure_;
    if (!known) callback_ = callback;
  }
  if (known) callback(known->what);
}

std::optional<std::string> StoreClient::failure(std::chrono::milliseconds wait) const {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, wait, [this] { return failure_.has_value(); });
  if (!failure_) return std::nullopt;
  return failure_->what;
}

void StoreClient::report_failure(const std::string& what) {
  const Failure failure{
      ErrorCode::rank_lost,
      fmt::format("{}: {}", rank_text(hello_.rank, hello_.host, hello_.process), what)};
  std::unique_lock lock(mutex_);
  if (failure_) return;
  send(FrameKind::failure, failure.encode());
  // Back from rank 0 it is known to be heard, also if this process ends now without a goodbye.
  if (std::this_thread::get_id() == thread_.get_id()) return;
  const bool heard =
      changed_.wait_for(lock, kFarewell, [this] { return failure_ || server_done_ || ended_; });
  if (heard && failure_) return;
  lock.unlock();
  asio::post(io_, [this, failure] { fail_with(failure); });
}

}  // namespace overspill
