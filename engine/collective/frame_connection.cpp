// Frames are [magic, kind, size of the body], 4 bytes each, and the body. Everything that a
// stranger may send is bounded: the size of a frame here, the time by the owner.
#include "engine/collective/frame_connection.h"

#include <fcntl.h>

#include <boost/asio/buffer.hpp>
#include <boost/asio/read.hpp>
#include <boost/asio/write.hpp>

namespace overspill {
namespace {

namespace asio = boost::asio;
using boost::system::error_code;

constexpr size_t kMaxQueuedBytes = 4 * kMaxBodyBytes;

asio::ip::address plain(const asio::ip::address& address) {
  if (!address.is_v6() || !address.to_v6().is_v4_mapped()) return address;
  return asio::ip::make_address_v4(asio::ip::v4_mapped, address.to_v6());
}

}  // namespace

void close_on_exec(int descriptor) { fcntl(descriptor, F_SETFD, FD_CLOEXEC); }

FrameConnection::FrameConnection(asio::ip::tcp::socket socket) : socket_(std::move(socket)) {
  close_on_exec(socket_.native_handle());
  error_code ignored;
  socket_.set_option(asio::ip::tcp::no_delay(true), ignored);
  // A connection that has ended already says so at the first read.
  local_ = plain(socket_.local_endpoint(ignored).address());
  remote_ = plain(socket_.remote_endpoint(ignored).address());
}

void FrameConnection::start(OnFrame on_frame, OnEnd on_end) {
  on_frame_ = std::move(on_frame);
  on_end_ = std::move(on_end);
  read_header();
}

void FrameConnection::read_header() {
  asio::async_read(
      socket_, asio::buffer(header_), [self = shared_from_this()](const error_code& error, size_t) {
        if (self->closed_) return;
        if (error) return self->end(error);
        FieldReader fields({self->header_.data(), self->header_.size()});
        const bool ours = fields.number() == kFrameMagic;
        const auto kind = static_cast<FrameKind>(fields.number());
        const uint32_t size = fields.number();
        if (!ours || size > self->max_body_bytes_) {
          return self->end(ConnectionEnd::foreign, "what it sends is not overspill's protocol");
        }
        self->read_body(kind, size);
      });
}

void FrameConnection::read_body(FrameKind kind, uint32_t size) {
  body_.resize(size);
  asio::async_read(socket_, asio::buffer(body_),
                   [self = shared_from_this(), kind](const error_code& error, size_t) {
                     if (self->closed_) return;
                     if (error) return self->end(error);
                     self->quiet_ticks_ = 0;
                     self->on_frame_(kind, std::move(self->body_));
                     if (!self->closed_) self->read_header();
                   });
}

void FrameConnection::send(FrameKind kind, std::string_view body) {
  if (closed_ || finishing_) return;
  FieldWriter header;
  header.number(kFrameMagic).number(static_cast<uint32_t>(kind));
  header.number(static_cast<uint32_t>(body.size()));
  queue_.push_back(header.take().append(body));
  queued_bytes_ += queue_.back().size();
  // The other side does not read: from now on it counts as silent.
  if (queued_bytes_ > kMaxQueuedBytes) return close();
  if (queue_.size() == 1) write_next();
}

void FrameConnection::write_next() {
  asio::async_write(socket_, asio::buffer(queue_.front()),
                    [self = shared_from_this()](const error_code& error, size_t) {
                      if (self->closed_) return;
                      // The reader tells the end: it may still have the reason to read.
                      if (error) return;
                      self->queued_bytes_ -= self->queue_.front().size();
                      self->queue_.pop_front();
                      if (!self->queue_.empty()) return self->write_next();
                      if (self->finishing_) self->finish();
                    });
}

void FrameConnection::finish() {
  finishing_ = true;
  error_code ignored;
  if (!closed_ && queue_.empty()) socket_.shutdown(asio::ip::tcp::socket::shutdown_send, ignored);
}

void FrameConnection::close() {
  closed_ = true;
  error_code ignored;
  socket_.close(ignored);
}

bool FrameConnection::tick(uint32_t most) {
  if (++quiet_ticks_ > most) return true;
  // One heartbeat waiting is enough: more would only pile up.
  if (queue_.empty()) send(FrameKind::heartbeat, {});
  return false;
}

void FrameConnection::end(ConnectionEnd end, const std::string& why) {
  close();
  on_end_(end, why);
}

void FrameConnection::end(const error_code& error) {
  const bool closed = error == asio::error::eof || error == asio::error::connection_reset ||
                      error == asio::error::broken_pipe;
  if (closed) return end(ConnectionEnd::closed, "its connection closed: it was killed or crashed");
  end(ConnectionEnd::broken, "its connection broke: " + error.message());
}

}  // namespace overspill
