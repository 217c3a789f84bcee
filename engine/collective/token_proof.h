// Proof that both ends of a connection know the run's token, without sending it: HMAC-SHA256 over
// fresh random challenges. Thread-safe: no state.
#pragma once

#include <string>
#include <string_view>

namespace overspill {

/// 32 bytes: HMAC-SHA256 (RFC 2104, FIPS 180-4).
std::string hmac_sha256(std::string_view key, std::string_view message);
/// Bytes from the system's generator. Throws Error(io) when it has none.
std::string random_bytes(size_t count);
/// Two lower-case digits a byte.
std::string to_hex(std::string_view bytes);
/// Whether the two are equal, in a time that does not tell where they differ.
bool equal_in_constant_time(std::string_view left, std::string_view right);

}  // namespace overspill
