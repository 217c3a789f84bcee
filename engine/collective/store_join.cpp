// How a rank finds rank 0 and proves that it belongs to the run.
#include <boost/asio/connect.hpp>
#include <thread>

#include "engine/base/error.h"
#include "engine/collective/store_client.h"
#include "engine/collective/token_proof.h"

namespace overspill {
namespace {

namespace asio = boost::asio;
using asio::ip::tcp;
using boost::system::error_code;
using std::chrono::milliseconds;

/// For rank 0 to announce that ranks are missing, past its own timeout.
constexpr milliseconds kAnnouncementTime{2000};

}  // namespace

void StoreClient::join(Clock::time_point deadline) {
  std::string why = "no time to try";
  for (milliseconds pause{20}; !try_connect(deadline, why);
       pause = std::min(2 * pause, milliseconds(500))) {
    throw_if_refused();
    if (Clock::now() + pause >= deadline) {
      fail(ErrorCode::rank_lost,
           "rank {} cannot find rank 0 at {} within {}: {}; see the output of rank 0, and whether "
           "MASTER_ADDR and MASTER_PORT are right and not behind a firewall",
           hello_.rank, place_, seconds_text(options_.join_timeout), why);
    }
    std::this_thread::sleep_for(pause);
  }
  // Rank 0 decides who is missing: its clock may have started later, and it names them.
  tick();
  const auto last = Clock::now() + options_.join_timeout + kAnnouncementTime;
  pump_until(last, [this] { return joined_ || failure_ || ended_; });
  if (failure_) throw Error(failure_->code, failure_->what);
  if (joined_) return;
  const std::string who = rank_text(hello_.rank, hello_.host, hello_.process);
  const Failure failure{ErrorCode::rank_lost,
                        fmt::format("{}: {} at {} {}", who, server_text(), place_,
                                    ended_ ? "ended before all ranks were there"
                                           : "has not said in time whether all ranks are there")};
  connection_->send(FrameKind::failure, failure.encode());
  throw Error(failure.code, failure.what);
}

bool StoreClient::pump_until(Clock::time_point deadline, const std::function<bool()>& condition) {
  while (!condition()) {
    io_.restart();
    if (io_.run_one_until(deadline) == 0) return condition();
  }
  return true;
}

/// One attempt to be welcomed; `why` not, when it is worth another one.
bool StoreClient::try_connect(Clock::time_point deadline, std::string& why) {
  error_code error;
  std::vector<tcp::endpoint> endpoints;
  if (endpoint_) {
    endpoints.push_back(*endpoint_);
  } else {
    tcp::resolver resolver(io_);
    for (const auto& entry : resolver.resolve(master_addr_, std::to_string(master_port_), error)) {
      endpoints.push_back(entry.endpoint());
    }
    if (error) return why = "the name cannot be resolved: " + error.message(), false;
  }
  const auto patience = std::min(deadline, Clock::now() + kHandshakeTime);
  tcp::socket socket(io_);
  bool done = false;
  asio::async_connect(socket, endpoints, [&](const error_code& result, const tcp::endpoint&) {
    error = result;
    done = true;
  });
  const bool in_time = pump_until(patience, [&] { return done; });
  if (!in_time) {
    error_code ignored;
    socket.close(ignored);
    // The handler refers to this frame: it must have run.
    pump_until(Clock::time_point::max(), [&] { return done; });
    return why = "no answer", false;
  }
  if (error) return why = error.message(), false;
  // Without a listener, a connection to a port of the ephemeral range can meet itself.
  if (socket.local_endpoint(error) == socket.remote_endpoint(error)) {
    return why = "nobody listens", false;
  }
  greet(std::move(socket));
  if (pump_until(patience, [this] { return welcomed_ || ended_; }) && welcomed_) return true;
  why = ended_ ? "the connection closed before a greeting" : "what listens there does not greet";
  connection_->close();
  return false;
}

void StoreClient::greet(tcp::socket socket) {
  ended_ = false;
  nonce_ = random_bytes(kNonceBytes);
  expected_proof_.clear();
  connection_ = std::make_shared<FrameConnection>(std::move(socket));
  connection_->start([this](FrameKind kind, const std::string& body) { on_frame(kind, body); },
                     [this](ConnectionEnd end, const std::string& why) {
                       if (end == ConnectionEnd::foreign && !welcomed_) {
                         refusal_ = fmt::format(
                             "what listens at {} is not overspill's rank 0: {}; choose another "
                             "MASTER_PORT",
                             place_, why);
                       }
                       on_end(end, why);
                     });
}

void StoreClient::throw_if_refused() const {
  if (refusal_) fail(ErrorCode::rank_lost, "{}", *refusal_);
}

void StoreClient::on_challenge(const std::string& body) {
  const std::string server_nonce = FieldReader(body).text();
  if (server_nonce.size() != kNonceBytes || !expected_proof_.empty()) return connection_->close();
  expected_proof_ = hmac_sha256(token_, "server" + server_nonce + nonce_);
  FieldWriter proof;
  proof.text(nonce_).text(hmac_sha256(token_, "client" + server_nonce + nonce_));
  connection_->send(FrameKind::proof, proof.take());
}

void StoreClient::on_welcome(const std::string& body) {
  FieldReader fields(body);
  const std::string proof = fields.text();
  if (expected_proof_.empty() || !equal_in_constant_time(proof, expected_proof_)) {
    refusal_ = fmt::format(
        "what listens at {} does not know this run's token: it is the rank 0 of "
        "another run, or a stranger; choose another MASTER_PORT",
        place_);
    return connection_->close();
  }
  server_host_ = fields.text();
  server_process_ = fields.number();
  welcomed_ = true;
  connection_->allow_large_frames();
  connection_->send(FrameKind::hello, hello_.encode());
}

}  // namespace overspill
