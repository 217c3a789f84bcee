// A rank's connection to rank 0's store: joining, requests, and news of the first failure. The
// public functions may be called from any thread; the connection belongs to a thread of its own.
#pragma once

#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "engine/collective/frame_connection.h"
#include "engine/collective/rendezvous.h"
#include "engine/collective/store_protocol.h"

namespace overspill {

class StoreClient {
 public:
  /// Joins at `endpoint`, or else at the identity's MASTER_ADDR:MASTER_PORT. See Rendezvous for
  /// what it throws.
  StoreClient(const RankIdentity& identity, const Rendezvous::Options& options,
              const RankHello& hello, std::optional<boost::asio::ip::tcp::endpoint> endpoint);
  ~StoreClient();

  const std::string& own_address() const { return own_address_; }
  void set(const std::string& key, const std::string& value);
  std::string get(const std::string& key, std::chrono::milliseconds timeout);
  void on_failure(std::function<void(const std::string& what)> callback);
  std::optional<std::string> failure(std::chrono::milliseconds wait) const;
  void report_failure(const std::string& what);

 private:
  using Clock = std::chrono::steady_clock;

  // Joining, on the constructor's thread.
  void join(Clock::time_point deadline);
  bool try_connect(Clock::time_point deadline, std::string& why);
  bool pump_until(Clock::time_point deadline, const std::function<bool()>& condition);
  void greet(boost::asio::ip::tcp::socket socket);
  void throw_if_refused() const;

  // On the connection's thread (the constructor's while it joins).
  void on_frame(FrameKind kind, const std::string& body);
  void on_challenge(const std::string& body);
  void on_welcome(const std::string& body);
  void on_end(ConnectionEnd end, const std::string& why);
  void tick();
  void fail_with(const Failure& failure);
  std::string server_text() const { return rank_text(0, server_host_, server_process_); }

  void send(FrameKind kind, std::string body);
  void throw_if_over(const std::string& action) const;

  const Rendezvous::Options options_;
  const RankHello hello_;
  const std::string token_, master_addr_, place_;
  const uint16_t master_port_;
  const std::optional<boost::asio::ip::tcp::endpoint> endpoint_;

  boost::asio::io_context io_;
  boost::asio::steady_timer tick_timer_{io_};
  std::shared_ptr<FrameConnection> connection_;
  std::string nonce_, expected_proof_;
  std::string server_host_;
  uint32_t server_process_ = 0;
  std::string own_address_;
  bool welcomed_ = false, joined_ = false, leaving_ = false;
  std::optional<std::string> refusal_;  ///< why trying again is of no use

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::optional<Failure> failure_;
  bool server_done_ = false, ended_ = false;
  std::map<uint32_t, std::optional<std::string>> replies_;
  uint32_t next_request_ = 0;
  std::function<void(const std::string&)> callback_;
  std::thread thread_;
};

}  // namespace overspill
