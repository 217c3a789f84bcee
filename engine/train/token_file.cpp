// Reads tokens by a file's layout, and scans every token once at opening, so that a bad one is
// found at the start and not in the middle of a run. Thread-safe after construction: reads are
// positional and nothing is cached.
#include "engine/train/token_file.h"

#include <fcntl.h>

#include <algorithm>
#include <array>
#include <limits>
#include <type_traits>

#include "engine/base/error.h"
#include "nvme/integrity.h"

namespace overspill {
namespace {

namespace fs = std::filesystem;

constexpr size_t kScanBlockBytes = 1 << 20;
constexpr size_t kCopyBlockBytes = 1 << 14;

/// Index of the first value outside [0, limit), or values.size(). The largest value comes first, in
/// a loop that compilers vectorise; a negative value is a large one when read as unsigned.
template <class Stored>
size_t find_out_of_range(std::span<const Stored> values, uint64_t limit) {
  using Unsigned = std::make_unsigned_t<Stored>;
  constexpr uint64_t kTypeLimit = uint64_t{std::numeric_limits<Stored>::max()} + 1;
  const uint64_t bound = std::min(limit, kTypeLimit);
  Unsigned largest = 0;
  for (const Stored value : values) largest = std::max(largest, static_cast<Unsigned>(value));
  if (largest < bound) return values.size();
  const auto found = std::find_if(values.begin(), values.end(), [bound](Stored value) {
    return static_cast<Unsigned>(value) >= bound;
  });
  return static_cast<size_t>(found - values.begin());
}

/// Calls `visit` with a zero of the C++ type that is stored.
template <class Visit>
void visit_stored(StoredToken type, Visit&& visit) {
  switch (type) {
    case StoredToken::u8: return visit(uint8_t{});
    case StoredToken::i8: return visit(int8_t{});
    case StoredToken::u16: return visit(uint16_t{});
    case StoredToken::i16: return visit(int16_t{});
    case StoredToken::i32: return visit(int32_t{});
    case StoredToken::u32: return visit(uint32_t{});
    case StoredToken::i64: return visit(int64_t{});
  }
}

class LaidOutTokenFile final : public TokenFile {
 public:
  LaidOutTokenFile(fs::path path, TokenLayout layout, uint32_t vocab_size)
      : path_(std::move(path)), layout_(std::move(layout)), vocab_size_(vocab_size) {
    if (layout_.sections) {
      marks_.emplace(layout_.file, *layout_.sections);
      vocab_size_ = std::min(vocab_size_, layout_.sections->vocab_size);
    }
    ::posix_fadvise(layout_.file.get(), 0, 0, POSIX_FADV_SEQUENTIAL);
    visit_stored(layout_.type, [this](auto zero) { scan<decltype(zero)>(); });
    ::posix_fadvise(layout_.file.get(), 0, 0, POSIX_FADV_NORMAL);
  }

  uint64_t token_count() const override { return layout_.token_count; }
  TokenFormat format() const override { return layout_.format; }
  const fs::path& path() const override { return path_; }
  const TokenMarks* marks() const override { return marks_ ? &*marks_ : nullptr; }

  void copy(uint64_t begin, std::span<int32_t> out) const override {
    CHECK(begin <= layout_.token_count && out.size() <= layout_.token_count - begin);
    visit_stored(layout_.type, [&](auto zero) { convert<decltype(zero)>(begin, out); });
  }

 private:
  /// A damaged file is said to be one, whatever its tokens are.
  template <class Stored>
  void scan() const {
    std::vector<Stored> block(kScanBlockBytes / sizeof(Stored));
    uint32_t crc = 0;
    uint64_t out_of_range = layout_.token_count;  // the first
    for (uint64_t done = 0; done < layout_.token_count;) {
      const auto values = read_stored<Stored>(done, block);
      if (layout_.sections) crc = crc32(std::as_bytes(values), crc);
      const size_t found = find_out_of_range<Stored>(values, stored_limit());
      if (found < values.size()) out_of_range = std::min(out_of_range, done + found);
      done += values.size();
    }
    if (layout_.sections && crc != layout_.sections->tokens_crc) {
      fail(ErrorCode::invalid_file,
           "{}: tokens: checksum 0x{:08x}, expected 0x{:08x}; copy the file again, or create it "
           "again with overspill prepare",
           path_.string(), crc, layout_.sections->tokens_crc);
    }
    if (out_of_range < layout_.token_count) {
      read_run<Stored>(out_of_range, std::span(block).first(1));
    }
  }

  template <class Stored>
  void convert(uint64_t begin, std::span<int32_t> out) const {
    std::array<Stored, kCopyBlockBytes / sizeof(Stored)> block;
    while (!out.empty()) {
      const auto ask = std::span(block).first(std::min(block.size(), out.size()));
      const auto values = read_run<Stored>(begin, ask);
      std::transform(values.begin(), values.end(), out.begin(), [this](Stored value) {
        return static_cast<int32_t>(value) + layout_.token_offset;
      });
      begin += values.size();
      out = out.subspan(values.size());
    }
  }

  /// As read_stored(). Checks them at every read: the file may have changed since it was opened,
  /// and a token out of range would index outside the embedding.
  template <class Stored>
  std::span<const Stored> read_run(uint64_t begin, std::span<Stored> block) const {
    const auto values = read_stored<Stored>(begin, block);
    check_range<Stored>(values, begin);
    return values;
  }

  /// Fills a prefix of `block` with the tokens from `begin` to at most the end of their piece.
  template <class Stored>
  std::span<const Stored> read_stored(uint64_t begin, std::span<Stored> block) const {
    const auto& pieces = layout_.pieces;
    const auto next = std::upper_bound(
        pieces.begin(), pieces.end(), begin,
        [](uint64_t token, const TokenPiece& piece) { return token < piece.first_token; });
    const TokenPiece& piece = *(next - 1);
    const uint64_t end = next == pieces.end() ? layout_.token_count : next->first_token;
    const auto values = block.first(std::min<uint64_t>(block.size(), end - begin));
    const uint64_t offset = piece.file_offset + (begin - piece.first_token) * sizeof(Stored);
    read_exact(layout_.file, offset, std::as_writable_bytes(values));
    return values;
  }

  /// Of values as they are stored.
  uint64_t stored_limit() const {
    const auto shift = static_cast<uint32_t>(layout_.token_offset);
    return vocab_size_ > shift ? vocab_size_ - shift : 0;
  }

  template <class Stored>
  void check_range(std::span<const Stored> values, uint64_t begin) const {
    const size_t found = find_out_of_range<Stored>(values, stored_limit());
    if (found == values.size()) return;
    fail(ErrorCode::invalid_file,
         "{}: token {} is {}, expected 0 to {} for a vocabulary of {}; the file was read as {}: "
         "tokenize for this model, or set the dataset's type if that is wrong",
         path_.string(), begin + found, static_cast<int64_t>(values[found]) + layout_.token_offset,
         vocab_size_ - 1, vocab_size_, token_format_name(layout_.format));
  }

  fs::path path_;
  TokenLayout layout_;
  uint32_t vocab_size_;
  std::optional<TokenMarks> marks_;
};

}  // namespace

std::unique_ptr<TokenFile> open_token_file(const TokenFileOptions& options) {
  CHECK(options.vocab_size > 0 && options.vocab_size <= uint32_t{1} << 31);
  TokenLayout layout = read_token_layout(options.path, options.format);
  if (layout.format == TokenFormat::text && !options.byte_tokenizer) {
    fail(ErrorCode::invalid_file,
         "{}: text, and this model has no byte tokenizer; turn it into tokens first, with "
         "nanoGPT's data/*/prepare.py, llm.c's dev/data scripts or Megatron-LM's "
         "tools/preprocess_data.py, and give the resulting .bin",
         options.path.string());
  }
  if (layout.token_count == 0) {
    fail(ErrorCode::invalid_file, "{}: holds no tokens; create the file again",
         options.path.string());
  }
  return std::make_unique<LaidOutTokenFile>(options.path, std::move(layout), options.vocab_size);
}

}  // namespace overspill
