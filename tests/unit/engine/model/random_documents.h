// Documents of random lengths in the sequences of a batch, as attention takes them.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/base/random.h"
#include "engine/model/kernels.h"

namespace overspill::test {

/// Per token where its document begins in its sequence. Documents have 1 to `longest` tokens; 0:
/// one a sequence.
inline std::vector<int32_t> random_documents(const AttentionShape& s, uint64_t key,
                                             uint64_t longest) {
  std::vector<int32_t> begins(s.batch * s.sequence_len);
  uint64_t begin = 0, end = 0;
  for (uint64_t row = 0; longest > 0 && row < begins.size(); ++row) {
    const uint64_t t = row % s.sequence_len;
    if (t == 0 || t == end) {
      begin = t;
      end = t + 1 + random_below(key, row, longest);
    }
    begins[row] = static_cast<int32_t>(begin);
  }
  return begins;
}

/// Of the same documents, per token the position in its sequence behind the last one's token.
inline std::vector<int32_t> document_ends(const AttentionShape& s,
                                          const std::vector<int32_t>& begins) {
  std::vector<int32_t> ends(begins.size());
  for (uint64_t row = begins.size(); row-- > 0;) {
    const bool last = row % s.sequence_len + 1 == s.sequence_len || begins[row + 1] != begins[row];
    ends[row] = last ? static_cast<int32_t>(row % s.sequence_len + 1) : ends[row + 1];
  }
  return ends;
}

}  // namespace overspill::test
