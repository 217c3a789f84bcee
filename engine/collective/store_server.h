// The store and the judge of who is lost: rank 0's side of the rendezvous, on a thread of its own.
// Only that thread touches the state below; the public functions may be called from any one.
#pragma once

#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <chrono>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/collective/frame_connection.h"
#include "engine/collective/rendezvous.h"
#include "engine/collective/store_protocol.h"

namespace overspill {

class StoreServer {
 public:
  /// Listens. Throws Error(rank_lost) when the port is in use or the address is none of this host.
  StoreServer(const RankIdentity& identity, const Rendezvous::Options& options,
              const RankHello& hello);
  /// Serves until the other ranks have said goodbye or are lost, at most a few seconds.
  ~StoreServer();

  /// Where rank 0's own client connects.
  boost::asio::ip::tcp::endpoint own_endpoint() const { return own_endpoint_; }

 private:
  enum class Stage { proof, hello, joined, done };
  struct Peer {
    std::shared_ptr<FrameConnection> connection;
    Stage stage = Stage::proof;
    std::string nonce;
    std::chrono::steady_clock::time_point since = std::chrono::steady_clock::now();
    RankHello hello;
    std::string text() const { return rank_text(hello.rank, hello.host, hello.process); }
  };

  void listen(const RankIdentity& identity);
  bool try_listen(const boost::asio::ip::tcp::endpoint& endpoint, boost::system::error_code& error);
  void run();
  void accept();
  void welcome(boost::asio::ip::tcp::socket socket);

  void on_frame(Peer& peer, FrameKind kind, const std::string& body);
  void on_proof(Peer& peer, const std::string& body);
  void on_hello(Peer& peer, const std::string& body);
  void on_request(Peer& peer, FrameKind kind, const std::string& body);

  void join_when_complete();
  std::string outward_address() const;
  void answer(Peer& peer, uint32_t request, const std::string& value);
  /// The peer takes part no longer; without a goodbye that is the run's failure, "<peer><why>".
  void lose(Peer& peer, const std::string& why);
  void fail_all(Failure failure);
  void turn_away(Peer& peer, const Failure& failure);
  void tick();
  void sweep_strangers();
  void leave();

  const Rendezvous::Options options_;
  const RankHello own_hello_;  ///< what every other rank is compared with
  const std::string token_, place_;

  boost::asio::io_context io_;
  boost::asio::ip::tcp::acceptor acceptor_{io_};
  boost::asio::ip::tcp::endpoint own_endpoint_;
  boost::asio::steady_timer tick_timer_{io_}, join_timer_{io_}, leave_timer_{io_};
  std::list<Peer> peers_;       ///< swept by tick only, so that handlers may hold references
  std::vector<Peer*> by_rank_;  ///< those that have joined, or null
  std::map<std::string, std::string> values_;
  std::multimap<std::string, std::pair<Peer*, uint32_t>> waiting_;  ///< gets of keys not yet set
  std::optional<Failure> failure_;
  uint32_t heard_ = 0;  ///< hellos; a run that cannot start stays for those still on their way
  bool accepting_ = false, complete_ = false, said_goodbye_ = false;
  std::chrono::steady_clock::time_point leave_at_;  ///< once the destructor has begun
  uint32_t warnings_ = 0;
  std::thread thread_;
};

}  // namespace overspill
