// The layout of the files that `overspill prepare` writes (docs/formats/tokens.md), with every rule
// of the format checked but for the tokens themselves, which are scanned by the reader.
#include <fcntl.h>

#include <bit>
#include <cstring>
#include <span>
#include <string>
#include <string_view>

#include "engine/base/error.h"
#include "engine/base/units.h"
#include "engine/train/token_file.h"
#include "nvme/integrity.h"

namespace overspill {
namespace {

constexpr std::string_view kMagic = "OSPTOKEN";
constexpr uint32_t kVersion = 1;
constexpr uint64_t kSectionAlignment = 4096, kBlockBytes = 1 << 20;
constexpr const char* kMakeAgain = "copy the file again, or create it again with overspill prepare";

struct Header {
  char magic[8];
  uint32_t version, header_bytes, token_bytes, flags;
  uint64_t token_count, document_count, sequence_len, trained_count;
  uint32_t vocab_size, pad_token;
  uint64_t tokens_offset, mask_offset, documents_offset, metadata_offset, metadata_bytes;
  uint64_t file_bytes;
  uint32_t tokens_crc, mask_crc, documents_crc, metadata_crc;
  uint8_t zero[124];
  uint32_t header_crc;

  bool masked() const { return (flags & 1) != 0; }
  uint64_t mask_bytes() const { return masked() ? ceil_div(token_count, uint64_t{8}) : 0; }
  uint64_t documents_bytes() const { return (document_count + 1) * sizeof(uint64_t); }
};
static_assert(sizeof(Header) == 256 && offsetof(Header, header_crc) == 252);

uint64_t next_section(uint64_t end) { return round_up(end, kSectionAlignment); }

/// A file with its header, which the checks below name in their messages.
class PreparedFile {
 public:
  explicit PreparedFile(const Fd& file) : file_(file) {}

  const Header& read_header() {
    const uint64_t size_bytes = file_size(file_);
    if (size_bytes < sizeof(Header)) {
      refuse("header truncated: {} bytes, expected {}; {}", size_bytes, sizeof(Header), kMakeAgain);
    }
    const auto bytes = std::as_writable_bytes(std::span(&header_, 1));
    read_exact(file_, 0, bytes);
    if (std::string_view(header_.magic, sizeof(header_.magic)) != kMagic) {
      refuse("does not begin with \"{}\"; set the dataset's type to what the file is, or to auto",
             kMagic);
    }
    if (header_.version != kVersion) {
      refuse(
          "version {} of the format, expected {}; create the file again with this version's "
          "overspill prepare",
          header_.version, kVersion);
    }
    const uint32_t crc = crc32(bytes.first(offsetof(Header, header_crc)));
    if (crc != header_.header_crc) mismatch("header", crc, header_.header_crc);
    check_header();
    if (size_bytes != header_.file_bytes) {
      refuse("{} bytes long, the header says {}; the file is {}, so {}", size_bytes,
             header_.file_bytes, size_bytes < header_.file_bytes ? "truncated" : "too long",
             kMakeAgain);
    }
    return header_;
  }

  void check_sections() {
    const Header& h = header_;
    check_crc("mask", h.mask_offset, h.mask_bytes(), h.mask_crc);
    check_crc("document starts", h.documents_offset, h.documents_bytes(), h.documents_crc);
    check_crc("metadata", h.metadata_offset, h.metadata_bytes, h.metadata_crc);
    if (h.masked()) check_mask();
    check_documents();
  }

 private:
  template <class... Args>
  [[noreturn]] void refuse(fmt::format_string<Args...> text, Args&&... args) const {
    fail(ErrorCode::invalid_file, "{}: {}", file_.path().string(),
         fmt::format(text, std::forward<Args>(args)...));
  }
  [[noreturn]] void mismatch(const char* section, uint32_t found, uint32_t expected) const {
    refuse("{}: checksum 0x{:08x}, expected 0x{:08x}; {}", section, found, expected, kMakeAgain);
  }
  void require(bool rule, const char* field, uint64_t value, const char* expected) const {
    if (!rule) refuse("header: {} is {}, expected {}; {}", field, value, expected, kMakeAgain);
  }

  void check_header() const {
    const Header& h = header_;
    constexpr uint64_t kMostTokens = uint64_t{1} << 48;  // no sum below overflows
    require(h.header_bytes == sizeof(Header), "header_bytes", h.header_bytes, "256");
    require(h.token_bytes == 2 || h.token_bytes == 4, "token_bytes", h.token_bytes, "2 or 4");
    require((h.flags & ~1u) == 0, "flags", h.flags, "0 or 1");
    require(h.token_count >= 1 && h.token_count <= kMostTokens, "token_count", h.token_count,
            "1 to 2^48");
    require(h.document_count >= 1 && h.document_count <= h.token_count, "document_count",
            h.document_count, "1 to token_count");
    require(h.sequence_len == 0 || h.token_count % h.sequence_len == 0, "sequence_len",
            h.sequence_len, "0 or a divisor of token_count");
    require(h.masked() ? h.trained_count <= h.token_count - h.document_count
                       : h.trained_count == h.token_count - h.document_count,
            "trained_count", h.trained_count,
            "token_count - document_count, or less where a mask is present");
    require(h.vocab_size >= 1, "vocab_size", h.vocab_size, "1 or more");
    uint64_t end = sizeof(Header);
    const auto section = [&](const char* field, uint64_t offset, uint64_t bytes) {
      require(offset == next_section(end), field, offset,
              "the next multiple of 4096 behind the section before it");
      end = offset + bytes;
    };
    section("tokens_offset", h.tokens_offset, h.token_count * h.token_bytes);
    if (h.masked()) section("mask_offset", h.mask_offset, h.mask_bytes());
    require(h.masked() || (h.mask_offset == 0 && h.mask_crc == 0), "mask_offset", h.mask_offset,
            "0, and no checksum, without a mask");
    section("documents_offset", h.documents_offset, h.documents_bytes());
    require(h.metadata_bytes <= kMostTokens, "metadata_bytes", h.metadata_bytes, "at most 2^48");
    section("metadata_offset", h.metadata_offset, h.metadata_bytes);
    require(h.file_bytes == end, "file_bytes", h.file_bytes, "the end of the metadata");
    for (const uint8_t byte : h.zero) require(byte == 0, "a reserved byte", byte, "0");
  }

  /// Calls `visit` with a section's bytes, block by block.
  template <class Visit>
  void each_block(uint64_t offset, uint64_t bytes, const Visit& visit) {
    block_.resize(std::min(bytes, kBlockBytes));
    for (uint64_t done = 0; done < bytes; done += block_.size()) {
      const auto part = std::span(block_).first(std::min<uint64_t>(block_.size(), bytes - done));
      read_exact(file_, offset + done, part);
      visit(part);
    }
  }

  void check_crc(const char* section, uint64_t offset, uint64_t bytes, uint32_t expected) {
    uint32_t crc = 0;
    each_block(offset, bytes, [&](std::span<const std::byte> part) { crc = crc32(part, crc); });
    if (crc != expected) mismatch(section, crc, expected);
  }

  void check_mask() {
    uint64_t trained = 0;
    uint8_t last = 0;
    each_block(header_.mask_offset, header_.mask_bytes(), [&](std::span<const std::byte> part) {
      for (const std::byte byte : part) trained += std::popcount(static_cast<uint8_t>(byte));
      last = static_cast<uint8_t>(part.back());
    });
    const uint64_t used = header_.token_count % 8;
    if (used != 0 && last >> used != 0) {
      refuse("mask: bits are set behind the last token; {}", kMakeAgain);
    }
    if (trained != header_.trained_count) {
      refuse("mask: {} tokens are trained on, the header says {}; {}", trained,
             header_.trained_count, kMakeAgain);
    }
  }

  /// Starts grow from 0 to the token count, hold every sequence's first token, and are not trained.
  void check_documents() {
    const uint64_t length = header_.sequence_len;
    uint64_t index = 0, last = 0, window_begin = 0;
    std::vector<uint8_t> window;  // of the mask; starts only grow
    const auto check = [&](uint64_t start) {
      const bool grows = index == 0 ? start == 0 : start > last;
      const bool ends = index < header_.document_count ? start < header_.token_count
                                                       : start == header_.token_count;
      if (!grows || !ends) {
        refuse("document starts: entry {} of {} is {} behind {}; they must grow from 0 to {}; {}",
               index, header_.document_count, start, last, header_.token_count, kMakeAgain);
      }
      if (length != 0 && index > 0 && last / length != (start - 1) / length) {
        refuse(
            "document starts: document {}, tokens {} to {}, crosses the end of a sequence of "
            "{}; {}",
            index - 1, last, start - 1, length, kMakeAgain);
      }
      if (header_.masked() && start < header_.token_count) {
        if (start / 8 >= window_begin + window.size()) {
          window_begin = start / 8;
          window.resize(std::min(kBlockBytes, header_.mask_bytes() - window_begin));
          read_exact(file_, header_.mask_offset + window_begin,
                     std::as_writable_bytes(std::span(window)));
        }
        if ((window[start / 8 - window_begin] >> (start % 8) & 1) != 0) {
          refuse("mask: token {} is trained on, but is the first of document {}; {}", start, index,
                 kMakeAgain);
        }
      }
      last = start;
      ++index;
    };
    each_block(header_.documents_offset, header_.documents_bytes(),
               [&](std::span<const std::byte> part) {
                 for (size_t at = 0; at < part.size(); at += sizeof(uint64_t)) {
                   uint64_t start = 0;
                   std::memcpy(&start, part.data() + at, sizeof(start));
                   check(start);
                 }
               });
  }

  const Fd& file_;
  Header header_{};
  std::vector<std::byte> block_;
};

}  // namespace

bool is_prepared(const Fd& file) {
  std::string start(std::min<uint64_t>(kMagic.size(), file_size(file)), '\0');
  read_exact(file, 0, std::as_writable_bytes(std::span(start)));
  return start == kMagic;
}

bool is_prepared_file(const std::filesystem::path& path, TokenFormat format) {
  std::error_code ignored;
  if (format != TokenFormat::automatic) return format == TokenFormat::prepared;
  return std::filesystem::is_regular_file(path, ignored) && is_prepared(open_file(path, O_RDONLY));
}

TokenLayout read_prepared_layout(Fd file) {
  PreparedFile prepared(file);
  const Header h = prepared.read_header();
  prepared.check_sections();
  TokenLayout layout;
  layout.file = std::move(file);
  layout.format = TokenFormat::prepared;
  layout.type = h.token_bytes == 2 ? StoredToken::u16 : StoredToken::u32;
  layout.token_count = h.token_count;
  layout.pieces.push_back({.first_token = 0, .file_offset = h.tokens_offset});
  layout.sections = TokenSections{.token_count = h.token_count,
                                  .sequence_len = h.sequence_len,
                                  .mask_offset = h.mask_offset,
                                  .documents_offset = h.documents_offset,
                                  .document_count = h.document_count,
                                  .vocab_size = h.vocab_size,
                                  .tokens_crc = h.tokens_crc};
  return layout;
}

}  // namespace overspill
