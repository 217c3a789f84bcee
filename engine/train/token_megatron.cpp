// Megatron's indexed dataset: a .bin of tokens, and an .idx with each sequence's length and place.
// The index is read a block at a time; kept are only the pieces it makes, which are one when the
// sequences lie in order. Does not read multimodal indexes or the older TNTIDX format.
#include <fcntl.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "engine/base/error.h"
#include "engine/train/token_file.h"

namespace overspill {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kMagic("MMIDIDX\0\0", 9);
constexpr uint64_t kHeaderBytes = 9 + 8 + 1 + 8 + 8;
constexpr uint64_t kSizeBytes = 4, kPointerBytes = 8, kDocumentBytes = 8;
constexpr size_t kBlock = 1 << 16;

struct Paths {
  fs::path bin, index;
};

struct Header {
  StoredToken type;
  uint64_t sequences, documents;
};

Paths pair_of(const fs::path& path) {
  const fs::path extension = path.extension();
  fs::path prefix = path;
  if (extension == ".bin" || extension == ".idx") prefix.replace_extension();
  return {.bin = prefix.string() + ".bin", .index = prefix.string() + ".idx"};
}

std::string read_start(const Fd& file, size_t size_bytes) {
  std::string start(std::min<uint64_t>(size_bytes, file_size(file)), '\0');
  read_exact(file, 0, std::as_writable_bytes(std::span(start)));
  return start;
}

template <class Value>
Value load(std::string_view bytes, size_t offset) {
  Value value;
  CHECK(offset + sizeof(value) <= bytes.size());
  std::memcpy(&value, bytes.data() + offset, sizeof(value));
  return value;
}

Header read_header(const Fd& index) {
  const std::string where = index.path().string();
  const std::string header = read_start(index, kHeaderBytes);
  if (!header.starts_with(kMagic)) {
    fail(ErrorCode::invalid_file,
         "{}: does not begin with Megatron's magic MMIDIDX; create the dataset with Megatron-LM's "
         "tools/preprocess_data.py",
         where);
  }
  if (header.size() < kHeaderBytes) {
    fail(ErrorCode::invalid_file,
         "{}: index truncated: {} bytes, expected at least {}; copy it again", where, header.size(),
         kHeaderBytes);
  }
  const auto version = load<uint64_t>(header, 9);
  if (version != 1) {
    fail(ErrorCode::invalid_file, "{}: index version {}, expected 1; create the dataset again",
         where, version);
  }
  // By Megatron's codes; 6 and 7 are floats, which no token is.
  constexpr std::array<std::optional<StoredToken>, 9> kTypes = {
      std::nullopt,     StoredToken::u8, StoredToken::i8, StoredToken::i16, StoredToken::i32,
      StoredToken::i64, std::nullopt,    std::nullopt,    StoredToken::u16};
  const auto code = load<uint8_t>(header, 17);
  if (code >= kTypes.size() || !kTypes[code]) {
    fail(ErrorCode::invalid_file,
         "{}: dtype code {}{}, expected 1 to 5 or 8, the integers; create the dataset again", where,
         code, code == 6 || code == 7 ? " (floating point)" : "");
  }
  return {.type = *kTypes[code],
          .sequences = load<uint64_t>(header, 18),
          .documents = load<uint64_t>(header, 26)};
}

void check_index_length(const Fd& index, const Header& header) {
  using Wide = unsigned __int128;
  const uint64_t size_bytes = file_size(index);
  const Wide needed = kHeaderBytes + Wide{header.sequences} * (kSizeBytes + kPointerBytes) +
                      Wide{header.documents} * kDocumentBytes;
  if (needed == size_bytes) return;
  fail(ErrorCode::invalid_file,
       "{}: index is {}: {} bytes for {} sequences and {} documents; copy or create it again",
       index.path().string(),
       needed > size_bytes ? "truncated" : "too long (multimodal indexes are not supported)",
       size_bytes, header.sequences, header.documents);
}

template <class Value>
void read_values(const Fd& file, uint64_t offset, std::span<Value> out) {
  read_exact(file, offset, std::as_writable_bytes(out));
}

/// Appends sequence after sequence to a layout and checks each against the .bin's length.
class PieceBuilder {
 public:
  PieceBuilder(TokenLayout& layout, const Fd& index)
      : layout_(layout), index_(index), bin_bytes_(file_size(layout.file)) {}

  void add(uint64_t sequence, int32_t size, int64_t pointer) {
    const uint64_t width = stored_token_bytes(layout_.type);
    const bool negative = size < 0 || pointer < 0;
    const auto offset = static_cast<uint64_t>(pointer);
    const uint64_t size_bytes = negative ? 0 : static_cast<uint64_t>(size) * width;
    if (negative || offset > bin_bytes_ || size_bytes > bin_bytes_ - offset) {
      fail(ErrorCode::invalid_file,
           "{}: sequence {} has {} tokens at byte {}, which is outside {} with its {} bytes; the "
           "files are damaged or do not belong together, so copy both again",
           index_.path().string(), sequence, size, pointer, layout_.file.path().string(),
           bin_bytes_);
    }
    if (size == 0) return;
    if (layout_.pieces.empty() || offset != end_offset_) {
      layout_.pieces.push_back({.first_token = layout_.token_count, .file_offset = offset});
    }
    end_offset_ = offset + size_bytes;
    layout_.token_count += static_cast<uint64_t>(size);
  }

  void finish() const {
    const uint64_t indexed = layout_.token_count * stored_token_bytes(layout_.type);
    if (indexed == bin_bytes_) return;
    fail(ErrorCode::invalid_file,
         "{}: its sequences take {} bytes, but {} is {} bytes long; the files do not belong "
         "together, so copy both again",
         index_.path().string(), indexed, layout_.file.path().string(), bin_bytes_);
  }

 private:
  TokenLayout& layout_;
  const Fd& index_;
  uint64_t bin_bytes_;
  uint64_t end_offset_ = 0;
};

void read_sequences(const Fd& index, const Header& header, TokenLayout& layout) {
  PieceBuilder builder(layout, index);
  const uint64_t pointers_offset = kHeaderBytes + header.sequences * kSizeBytes;
  std::vector<int32_t> sizes(std::min<uint64_t>(header.sequences, kBlock));
  std::vector<int64_t> pointers(sizes.size());
  for (uint64_t begin = 0; begin < header.sequences; begin += sizes.size()) {
    const size_t count = std::min<uint64_t>(sizes.size(), header.sequences - begin);
    read_values(index, kHeaderBytes + begin * kSizeBytes, std::span(sizes).first(count));
    read_values(index, pointers_offset + begin * kPointerBytes, std::span(pointers).first(count));
    for (size_t i = 0; i < count; ++i) builder.add(begin + i, sizes[i], pointers[i]);
  }
  builder.finish();
}

void check_documents(const Fd& index, const Header& header) {
  const uint64_t offset = kHeaderBytes + header.sequences * (kSizeBytes + kPointerBytes);
  std::vector<uint64_t> documents(std::min<uint64_t>(header.documents, kBlock));
  uint64_t last = 0;
  for (uint64_t begin = 0; begin < header.documents; begin += documents.size()) {
    const size_t count = std::min<uint64_t>(documents.size(), header.documents - begin);
    const auto block = std::span(documents).first(count);
    read_values(index, offset + begin * kDocumentBytes, block);
    for (size_t i = 0; i < count; ++i) {
      if (block[i] < last || block[i] > header.sequences) {
        fail(ErrorCode::invalid_file,
             "{}: document {} begins at sequence {}, expected {} to {}; copy or create the index "
             "again",
             index.path().string(), begin + i, block[i], last, header.sequences);
      }
      last = block[i];
    }
  }
}

}  // namespace

bool is_megatron(const fs::path& path) {
  if (path.extension() == ".idx") return true;
  const Paths paths = pair_of(path);
  std::error_code ignored;
  if (!fs::is_regular_file(paths.index, ignored)) return false;
  return read_start(open_file(paths.index, O_RDONLY), kMagic.size()) == kMagic;
}

TokenLayout read_megatron_layout(const fs::path& path) {
  const Paths paths = pair_of(path);
  std::error_code ignored;
  for (const fs::path& file : {paths.bin, paths.index}) {
    if (fs::exists(file, ignored)) continue;
    fail(ErrorCode::not_found,
         "{}: no such file; a Megatron dataset is a .bin and an .idx of the same name",
         file.string());
  }
  const Fd index = open_file(paths.index, O_RDONLY);
  const Header header = read_header(index);
  check_index_length(index, header);
  TokenLayout layout;
  layout.file = open_file(paths.bin, O_RDONLY);
  layout.format = TokenFormat::megatron;
  layout.type = header.type;
  read_sequences(index, header, layout);
  check_documents(index, header);
  return layout;
}

}  // namespace overspill
