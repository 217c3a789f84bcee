// What a prepared token file says of its tokens besides their values: which are trained on, and
// where documents begin (docs/formats/tokens.md). Read with pread where it is asked for; nothing is
// cached. Thread-safe.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/base/fd.h"

namespace overspill {

/// Where the sections of a prepared file lie.
struct TokenSections {
  uint64_t token_count = 0;
  uint64_t sequence_len = 0;  ///< the file is whole sequences of it; 0: a stream
  uint64_t mask_offset = 0;   ///< 0: all tokens are trained on but documents' first
  uint64_t documents_offset = 0;
  uint64_t document_count = 0;
  uint32_t vocab_size = 0;
  uint32_t tokens_crc = 0;
};

class TokenMarks {
 public:
  /// Checked sections of a file that outlives this.
  TokenMarks(const Fd& file, const TokenSections& sections) : file_(file), sections_(sections) {}

  uint64_t sequence_len() const { return sections_.sequence_len; }
  /// Replaces those of tokens [begin, begin + tokens.size()) that are not trained on by
  /// kNotTrained.
  void mask(uint64_t begin, std::span<int32_t> tokens) const;
  /// For a sequence of tokens [begin, begin + out.size()): the position in it where each token's
  /// document begins; 0 for a document that goes on from before.
  void document_begins(uint64_t begin, std::span<int32_t> out) const;

 private:
  uint64_t document_start(uint64_t document) const;
  /// Those among [begin, end), in order.
  std::vector<uint64_t> document_starts(uint64_t begin, uint64_t end) const;

  const Fd& file_;
  const TokenSections sections_;
};

}  // namespace overspill
