// Finds out which format a token file has, and reads the layouts of llm.c's, nanoGPT's and plain
// text files. Nothing of a file stays in memory.
// nanoGPT's files have no header: whatever is neither llm.c, Megatron nor text is taken for one.
#include <fcntl.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <optional>
#include <span>
#include <string>

#include "engine/base/error.h"
#include "engine/train/token_file.h"

namespace overspill {
namespace {

namespace fs = std::filesystem;
static_assert(std::endian::native == std::endian::little, "all formats are little-endian");

constexpr size_t kBlockBytes = 1 << 20;
constexpr int32_t kByteTokenOffset = 3;  // ByT5: pad, end and unknown come before the bytes
// 32 tokens whose bytes are all printable do not happen by chance: such a file was meant as text.
constexpr uint64_t kSurelyText = 64;

constexpr uint32_t kLlmcMagicU16 = 20240520, kLlmcMagicU32 = 20240801;
constexpr uint64_t kLlmcHeaderBytes = 256 * 4;

struct LlmcHeader {
  uint32_t magic = 0, version = 0, token_count = 0;
};

TokenLayout one_piece(Fd file, TokenFormat format, StoredToken type, uint64_t file_offset) {
  TokenLayout layout;
  layout.token_count = (file_size(file) - file_offset) / stored_token_bytes(type);
  layout.file = std::move(file);
  layout.format = format;
  layout.type = type;
  layout.pieces.push_back({.first_token = 0, .file_offset = file_offset});
  return layout;
}

/// The header's start; zero where the file is shorter.
LlmcHeader read_llmc_header(const Fd& file) {
  LlmcHeader header;
  const auto bytes = std::as_writable_bytes(std::span(&header, 1));
  read_exact(file, 0, bytes.first(std::min<uint64_t>(bytes.size(), file_size(file))));
  return header;
}

bool is_llmc(const Fd& file) {
  const uint32_t magic = read_llmc_header(file).magic;
  return magic == kLlmcMagicU16 || magic == kLlmcMagicU32;
}

TokenLayout read_llmc_layout(Fd file) {
  const std::string where = file.path().string();
  if (!is_llmc(file)) {
    fail(ErrorCode::invalid_file,
         "{}: does not begin with llm.c's magic number {} or {}; set the dataset's type to what "
         "the file is, or to auto",
         where, kLlmcMagicU16, kLlmcMagicU32);
  }
  const uint64_t size_bytes = file_size(file);
  if (size_bytes < kLlmcHeaderBytes) {
    fail(ErrorCode::invalid_file,
         "{}: llm.c header truncated: {} bytes, expected {}; copy or create the file again", where,
         size_bytes, kLlmcHeaderBytes);
  }
  const LlmcHeader header = read_llmc_header(file);
  const bool wide = header.magic == kLlmcMagicU32;
  const uint32_t version = wide ? 7 : 1;
  if (header.version != version) {
    fail(ErrorCode::invalid_file,
         "{}: llm.c version {} with magic {}, expected version {}; create the file again with "
         "llm.c's dev/data scripts",
         where, header.version, header.magic, version);
  }
  const StoredToken type = wide ? StoredToken::u32 : StoredToken::u16;
  const uint64_t contents = size_bytes - kLlmcHeaderBytes;
  const uint64_t needed = uint64_t{header.token_count} * stored_token_bytes(type);
  if (contents != needed) {
    fail(ErrorCode::invalid_file,
         "{}: the header says {} tokens ({} bytes), but {} bytes follow it; the file is {}, so "
         "copy or create it again",
         where, header.token_count, needed, contents, contents < needed ? "truncated" : "too long");
  }
  return one_piece(std::move(file), TokenFormat::llmc, type, kLlmcHeaderBytes);
}

/// UTF-8 (RFC 3629: no overlong forms, no surrogates) without control bytes but tab, line feed,
/// form feed and carriage return; fed byte by byte.
class TextChecker {
 public:
  bool accept(uint8_t byte) {
    if (continuations_ > 0) {
      const bool valid = byte >= low_ && byte <= high_;
      low_ = 0x80, high_ = 0xbf, --continuations_;
      return valid;
    }
    if (byte < 0x80) return accept_ascii(byte);
    if (byte < 0xc2 || byte > 0xf4) return false;
    continuations_ = byte < 0xe0 ? 1 : byte < 0xf0 ? 2 : 3;
    if (byte == 0xe0) low_ = 0xa0;
    if (byte == 0xed) high_ = 0x9f;
    if (byte == 0xf0) low_ = 0x90;
    if (byte == 0xf4) high_ = 0x8f;
    return true;
  }
  bool complete() const { return continuations_ == 0; }

 private:
  static bool accept_ascii(uint8_t byte) {
    const bool space = byte == '\t' || byte == '\n' || byte == '\f' || byte == '\r';
    return space || (byte >= 0x20 && byte != 0x7f);
  }

  int continuations_ = 0;
  uint8_t low_ = 0x80, high_ = 0xbf;
};

/// Offset of the first byte that is not text; the file's size when a character is cut off at its
/// end; nothing when all of it is text.
std::optional<uint64_t> find_non_text(const Fd& file) {
  const uint64_t size_bytes = file_size(file);
  TextChecker checker;
  std::vector<uint8_t> block(std::min<uint64_t>(size_bytes, kBlockBytes));
  for (uint64_t begin = 0; begin < size_bytes; begin += block.size()) {
    const size_t count = std::min<uint64_t>(block.size(), size_bytes - begin);
    read_exact(file, begin, std::as_writable_bytes(std::span(block).first(count)));
    for (size_t i = 0; i < count; ++i) {
      if (!checker.accept(block[i])) return begin + i;
    }
  }
  return checker.complete() ? std::nullopt : std::optional(size_bytes);
}

[[noreturn]] void fail_non_text(const Fd& file, uint64_t offset) {
  if (offset == file_size(file)) {
    fail(ErrorCode::invalid_file,
         "{}: text ends inside a UTF-8 character; the file is truncated, so copy it again",
         file.path().string());
  }
  uint8_t byte = 0;
  read_exact(file, offset, std::as_writable_bytes(std::span(&byte, 1)));
  fail(ErrorCode::invalid_file,
       "{}: byte 0x{:02x} at offset {} is not UTF-8 text; convert the file to UTF-8 (iconv) or "
       "remove the byte, or set the dataset's type to nanogpt if the file holds tokens",
       file.path().string(), byte, offset);
}

TokenLayout text_layout(Fd file) {
  TokenLayout layout = one_piece(std::move(file), TokenFormat::text, StoredToken::u8, 0);
  layout.token_offset = kByteTokenOffset;
  return layout;
}

TokenLayout read_nanogpt_layout(Fd file) {
  const uint64_t size_bytes = file_size(file);
  if (size_bytes % 2 != 0) {
    fail(ErrorCode::invalid_file,
         "{}: {} bytes long, expected an even number for nanoGPT's 16-bit tokens; it is truncated "
         "or of another format, so create it again or set the dataset's type",
         file.path().string(), size_bytes);
  }
  return one_piece(std::move(file), TokenFormat::nanogpt, StoredToken::u16, 0);
}

Fd open_token_data(const fs::path& path) {
  std::error_code ignored;
  if (!fs::exists(path, ignored)) {
    fail(ErrorCode::not_found,
         "{}: no such file, and no Megatron dataset of this prefix (.bin and .idx) either; check "
         "the dataset's path",
         path.string());
  }
  if (!fs::is_regular_file(path, ignored)) {
    fail(ErrorCode::invalid_file, "{}: not a regular file; give a file of tokens or text",
         path.string());
  }
  return open_file(path, O_RDONLY);
}

}  // namespace

TokenLayout read_token_layout(const fs::path& path, TokenFormat format) {
  const bool automatic = format == TokenFormat::automatic;
  if (format == TokenFormat::megatron || (automatic && is_megatron(path))) {
    return read_megatron_layout(path);
  }
  Fd file = open_token_data(path);
  if (file_size(file) == 0) {
    fail(ErrorCode::invalid_file, "{}: empty; give a file of tokens or text", path.string());
  }
  if (format == TokenFormat::prepared || (automatic && is_prepared(file))) {
    return read_prepared_layout(std::move(file));
  }
  if (format == TokenFormat::llmc || (automatic && is_llmc(file))) {
    return read_llmc_layout(std::move(file));
  }
  if (format == TokenFormat::nanogpt) return read_nanogpt_layout(std::move(file));
  const auto non_text = find_non_text(file);
  if (!non_text) return text_layout(std::move(file));
  if (!automatic || *non_text >= kSurelyText) fail_non_text(file, *non_text);
  return read_nanogpt_layout(std::move(file));
}

}  // namespace overspill
