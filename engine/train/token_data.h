// Token sequences from files: those of `overspill prepare`, nanoGPT (headerless uint16), llm.c
// (both magics), Megatron (.bin + .idx), and plain text for models with a byte tokenizer (ByT5's
// ids: byte + 3). The order of sequences is a pure function of (seed, cursor). Thread-safe after
// construction.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace overspill {

class TokenMarks;

enum class TokenFormat : uint8_t { automatic, prepared, nanogpt, llmc, megatron, text };

/// Accepted spellings of datasets[].type, and the parser for them (Error(invalid_config)).
TokenFormat parse_token_format(const std::string& text);
const char* token_format_name(TokenFormat format);

/// Whether a file of this format is one of `overspill prepare`; false where it cannot be read.
bool is_prepared_file(const std::filesystem::path& path, TokenFormat format);

/// One token file, read with pread: its pages never count as memory of this process.
class TokenFile {
 public:
  virtual ~TokenFile() = default;
  virtual uint64_t token_count() const = 0;
  virtual TokenFormat format() const = 0;
  virtual const std::filesystem::path& path() const = 0;
  /// Copies tokens [begin, begin + out.size()).
  virtual void copy(uint64_t begin, std::span<int32_t> out) const = 0;
  /// What is trained on and where documents begin; null for formats that do not say: everything,
  /// and one document.
  virtual const TokenMarks* marks() const { return nullptr; }
};

struct TokenFileOptions {
  std::filesystem::path path;
  TokenFormat format = TokenFormat::automatic;  ///< automatic: detected by content
  uint32_t vocab_size = 0;      ///< a token at or above it is an Error naming file and position
  bool byte_tokenizer = false;  ///< text is allowed
};
/// Throws Error(not_found / invalid_file): unreadable, truncated, damaged, wrong version, odd
/// length, empty, token out of range, or text for a model without a byte tokenizer (says what to do
/// instead).
std::unique_ptr<TokenFile> open_token_file(const TokenFileOptions& options);

/// Non-overlapping sequences of `sequence_len` over one or more files, in file order or shuffled.
/// Sequence s of a file covers tokens [T s, T s + T]; targets are the inputs shifted by one, or
/// kNotTrained where a prepared file says so, and at the end of a sequence that it ends.
class SequenceData {
 public:
  struct Options {
    uint32_t sequence_len = 0;
    bool shuffle = false;
    uint64_t seed = 0;
  };
  /// Throws Error(invalid_file) when no file holds sequence_len + 1 tokens, or one was prepared for
  /// sequences of another length.
  SequenceData(std::vector<std::unique_ptr<TokenFile>> files, const Options& options);

  /// Sequences in one epoch.
  uint64_t size() const { return total_; }
  /// Whether targets may be kNotTrained, and sequences may hold several documents.
  bool marked() const;
  /// Fills inputs and targets (sequence_len each) of the cursor-th sequence, cursor from 0 upwards
  /// without end: epoch = cursor / size(), each epoch a permutation of its own when shuffled.
  /// `document_begins`, unless it is empty: as TokenMarks::document_begins().
  void get(uint64_t cursor, std::span<int32_t> inputs, std::span<int32_t> targets,
           std::span<int32_t> document_begins = {}) const;
  /// The sequence index (in file order) that the cursor names.
  uint64_t sequence_at(uint64_t cursor) const;

 private:
  uint64_t count_sequences(const TokenFile& file) const;

  std::vector<std::unique_ptr<TokenFile>> files_;
  std::vector<uint64_t> first_;  ///< first sequence index of each file
  uint64_t total_ = 0;
  Options options_;
};

}  // namespace overspill
