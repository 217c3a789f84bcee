// How the tokens of one file lie in it, as its format says; shared by the formats' parsers and the
// reader. Values, no state.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <vector>

#include "engine/base/fd.h"
#include "engine/train/token_data.h"
#include "engine/train/token_marks.h"

namespace overspill {

enum class StoredToken : uint8_t { u8, i8, u16, i16, i32, u32, i64 };

constexpr uint32_t stored_token_bytes(StoredToken type) {
  switch (type) {
    case StoredToken::u8:
    case StoredToken::i8: return 1;
    case StoredToken::u16:
    case StoredToken::i16: return 2;
    case StoredToken::i32:
    case StoredToken::u32: return 4;
    case StoredToken::i64: break;
  }
  return 8;
}

/// Tokens that lie one after the other in the file, up to the next piece's first.
struct TokenPiece {
  uint64_t first_token;
  uint64_t file_offset;
};

struct TokenLayout {
  Fd file;
  TokenFormat format = TokenFormat::automatic;
  StoredToken type = StoredToken::u16;
  int32_t token_offset = 0;  ///< added to every stored value
  uint64_t token_count = 0;
  std::vector<TokenPiece> pieces;           ///< in token order, none empty
  std::optional<TokenSections> sections{};  ///< of a prepared file
};

/// Finds out (for TokenFormat::automatic) or takes the format, and checks headers and lengths, but
/// no token. Throws Error(not_found / invalid_file).
TokenLayout read_token_layout(const std::filesystem::path& path, TokenFormat format);

/// The same for a file of `overspill prepare`, whose sections but the tokens are checked too.
TokenLayout read_prepared_layout(Fd file);
bool is_prepared(const Fd& file);

/// The same for Megatron's pair of files; `path` is their prefix, the .bin or the .idx.
TokenLayout read_megatron_layout(const std::filesystem::path& path);
/// Whether `path` names such a pair: an .idx, or a file beside which an index lies.
bool is_megatron(const std::filesystem::path& path);

}  // namespace overspill
