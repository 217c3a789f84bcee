// One TCP connection that carries frames. Belongs to the thread that runs its io_context; nothing
// here may be called from another one.
#pragma once

#include <array>
#include <boost/asio/ip/tcp.hpp>
#include <deque>
#include <functional>
#include <memory>
#include <string>

#include "engine/collective/store_protocol.h"

namespace overspill {

enum class ConnectionEnd {
  closed,   ///< by the other side, in order or by its kernel
  broken,   ///< by the network
  foreign,  ///< what came is no frame, or too large
};

class FrameConnection : public std::enable_shared_from_this<FrameConnection> {
 public:
  using OnFrame = std::function<void(FrameKind kind, std::string body)>;
  using OnEnd = std::function<void(ConnectionEnd end, const std::string& why)>;

  /// Bodies up to kMaxStrangerBytes are taken until allow_large_frames().
  explicit FrameConnection(boost::asio::ip::tcp::socket socket);

  /// Calls on_frame for each frame and on_end at most once; neither after close().
  void start(OnFrame on_frame, OnEnd on_end);
  void allow_large_frames() { max_body_bytes_ = kMaxBodyBytes; }
  void send(FrameKind kind, std::string_view body);
  /// Sends what waits, then says by TCP that no more comes. Reading goes on.
  void finish();
  void close();
  bool closed() const { return closed_; }

  /// Once a heartbeat interval: sends a heartbeat; true when the other side has been silent for
  /// more than `most` of them.
  bool tick(uint32_t most);

  boost::asio::ip::address local_address() const { return local_; }
  boost::asio::ip::address remote_address() const { return remote_; }

 private:
  void read_header();
  void read_body(FrameKind kind, uint32_t size);
  void write_next();
  void end(ConnectionEnd end, const std::string& why);
  void end(const boost::system::error_code& error);

  boost::asio::ip::tcp::socket socket_;
  boost::asio::ip::address local_, remote_;
  OnFrame on_frame_;
  OnEnd on_end_;
  std::array<char, 12> header_{};
  std::string body_;
  std::deque<std::string> queue_;  ///< whole frames; the first one is being written
  size_t queued_bytes_ = 0, max_body_bytes_ = kMaxStrangerBytes;
  uint32_t quiet_ticks_ = 0;
  bool finishing_ = false, closed_ = false;
};

/// Closed in programs that this process starts: one of those would keep the connection of a dead
/// rank open.
void close_on_exec(int descriptor);

}  // namespace overspill
