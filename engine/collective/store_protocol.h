// What travels between rank 0's store and its clients: frames of a kind and a body of fields. The
// order on a new connection: challenge, proof, welcome, hello, then joined or failure.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "engine/base/error.h"

namespace overspill {

enum class FrameKind : uint32_t {
  challenge,  ///< server: nonce
  proof,      ///< client: nonce, proof of the token
  refused,    ///< server: the proof is wrong
  welcome,    ///< server: proof of the token, its host and process
  hello,      ///< client: RankHello
  joined,     ///< server: all ranks are there; this rank's address
  set,        ///< client: key, value
  get,        ///< client: request, key
  value,      ///< server: request, value
  heartbeat,  ///< both: nothing
  failure,    ///< both: Failure
  goodbye,    ///< both: this end is done; what follows is no failure
};

constexpr uint32_t kFrameMagic = 0x4f565331;  // "OVS1"; a new number when this handshake changes
constexpr size_t kMaxStrangerBytes = 1024;    ///< a frame's body before the token is proven
constexpr size_t kMaxBodyBytes = size_t{16} << 20;
constexpr size_t kNonceBytes = 16;
/// How long a connection may take until its hello.
constexpr std::chrono::milliseconds kHandshakeTime{5000};
/// A peer is lost after some heartbeat intervals without a byte from it, counted by the ticks of
/// the one who waits: a process that was stopped itself then accuses nobody when it goes on.
inline std::chrono::milliseconds heartbeat_interval(std::chrono::milliseconds silence_timeout) {
  return std::clamp(silence_timeout / 5, std::chrono::milliseconds(1),
                    std::chrono::milliseconds(5000));
}
inline uint32_t silent_ticks(std::chrono::milliseconds silence_timeout) {
  return static_cast<uint32_t>(silence_timeout / heartbeat_interval(silence_timeout));
}

/// Fields one after the other: numbers of 4 bytes, texts with their length in front.
class FieldWriter {
 public:
  FieldWriter& number(uint32_t value) {
    for (int shift = 0; shift < 32; shift += 8) body_ += static_cast<char>(value >> shift);
    return *this;
  }
  FieldWriter& text(std::string_view value) {
    number(static_cast<uint32_t>(value.size()));
    body_ += value;
    return *this;
  }
  std::string take() { return std::move(body_); }

 private:
  std::string body_;
};

/// Reads them back; a field that is not there is 0 or empty and clears ok().
class FieldReader {
 public:
  explicit FieldReader(std::string_view body) : rest_(body) {}
  uint32_t number() {
    if (rest_.size() < 4) return broken(0u);
    uint32_t value = 0;
    for (size_t i = 4; i-- > 0;) value = value << 8 | static_cast<uint8_t>(rest_[i]);
    rest_.remove_prefix(4);
    return value;
  }
  std::string text() {
    const uint32_t size = number();
    if (rest_.size() < size) return broken(std::string());
    std::string value(rest_.substr(0, size));
    rest_.remove_prefix(size);
    return value;
  }
  bool ok() const { return ok_; }

 private:
  template <class T>
  T broken(T value) {
    ok_ = false;
    rest_ = {};
    return value;
  }
  std::string_view rest_;
  bool ok_ = true;
};

/// Why a run ends, the same on all ranks.
struct Failure {
  ErrorCode code = ErrorCode::rank_lost;
  std::string what;

  std::string encode() const {
    const bool config = code == ErrorCode::invalid_config;
    return FieldWriter().number(config ? 1 : 0).text(what).take();
  }
  static Failure decode(std::string_view body) {
    FieldReader fields(body);
    const bool config = fields.number() == 1;
    return {config ? ErrorCode::invalid_config : ErrorCode::rank_lost, fields.text()};
  }
};

/// What a rank says of itself when it joins. The version comes first: what follows may differ.
struct RankHello {
  std::string version;
  uint32_t rank = 0, ranks = 1;
  std::string host;
  uint32_t process = 0;
  std::string config;

  std::string encode() const {
    FieldWriter fields;
    fields.text(version).number(rank).number(ranks).text(host).number(process).text(config);
    return fields.take();
  }
  /// Whether the body held all of it.
  bool decode(std::string_view body) {
    FieldReader fields(body);
    version = fields.text();
    rank = fields.number();
    ranks = fields.number();
    host = fields.text();
    process = fields.number();
    config = fields.text();
    return fields.ok();
  }
};

inline std::string rank_text(uint32_t rank, const std::string& host, uint32_t process) {
  return fmt::format("rank {} (host {}, process {})", rank, host, process);
}

inline std::string seconds_text(std::chrono::milliseconds time) {
  return fmt::format("{:g} s", static_cast<double>(time.count()) / 1000.0);
}

}  // namespace overspill
