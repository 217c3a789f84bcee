// Token sequences from files: nanoGPT (headerless uint16), llm.c (both magics), Megatron
// (.bin + .idx), and plain text for models with a byte tokenizer (ByT5's ids: byte + 3).
// The order of sequences is a pure function of (seed, cursor). Thread-safe after construction.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace overspill {

enum class TokenFormat : uint8_t { automatic, nanogpt, llmc, megatron, text };

/// Accepted spellings of datasets[].type, and the parser for them (Error(invalid_config)).
TokenFormat parse_token_format(const std::string& text);
const char* token_format_name(TokenFormat format);

/// One token file, read with pread: its pages never count as memory of this process.
class TokenFile {
 public:
  virtual ~TokenFile() = default;
  virtual uint64_t token_count() const = 0;
  virtual TokenFormat format() const = 0;
  virtual const std::filesystem::path& path() const = 0;
  /// Copies tokens [begin, begin + out.size()).
  virtual void copy(uint64_t begin, std::span<int32_t> out) const = 0;
};

struct TokenFileOptions {
  std::filesystem::path path;
  TokenFormat format = TokenFormat::automatic;  ///< automatic: detected by content
  uint32_t vocab_size = 0;      ///< a token at or above it is an Error naming file and position
  bool byte_tokenizer = false;  ///< text is allowed
};
/// Throws Error(not_found / invalid_file): unreadable, truncated, wrong version, odd length, empty,
/// token out of range, or text for a model without a byte tokenizer (says what to do instead).
std::unique_ptr<TokenFile> open_token_file(const TokenFileOptions& options);

/// Non-overlapping sequences of `sequence_len` over one or more files, in file order or shuffled.
/// Sequence s of a file covers tokens [T s, T s + T]; targets are the inputs shifted by one.
class SequenceData {
 public:
  struct Options {
    uint32_t sequence_len = 0;
    bool shuffle = false;
    uint64_t seed = 0;
  };
  /// Throws Error(invalid_file) when no file holds sequence_len + 1 tokens.
  SequenceData(std::vector<std::unique_ptr<TokenFile>> files, const Options& options);

  /// Sequences in one epoch.
  uint64_t size() const { return total_; }
  /// Fills inputs and targets (sequence_len each) of the cursor-th sequence, cursor from 0 upwards
  /// without end: epoch = cursor / size(), each epoch a permutation of its own when shuffled.
  void get(uint64_t cursor, std::span<int32_t> inputs, std::span<int32_t> targets) const;
  /// The sequence index (in file order) that the cursor names.
  uint64_t sequence_at(uint64_t cursor) const;

 private:
  std::vector<std::unique_ptr<TokenFile>> files_;
  std::vector<uint64_t> first_;  ///< first sequence index of each file
  uint64_t total_ = 0;
  Options options_;
};

}  // namespace overspill
