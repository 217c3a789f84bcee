// Bits and document starts by position. Starts are found by bisection: a file may have more
// documents than fit in memory.
#include "engine/train/token_marks.h"

#include <algorithm>

#include "engine/base/error.h"
#include "engine/base/units.h"
#include "engine/model/kernels.h"

namespace overspill {

void TokenMarks::mask(uint64_t begin, std::span<int32_t> tokens) const {
  CHECK(begin <= sections_.token_count && tokens.size() <= sections_.token_count - begin);
  if (sections_.mask_offset == 0) {
    for (const uint64_t start : document_starts(begin, begin + tokens.size())) {
      tokens[start - begin] = kNotTrained;
    }
    return;
  }
  const uint64_t first_byte = begin / 8;
  std::vector<uint8_t> bits(ceil_div(begin + tokens.size(), uint64_t{8}) - first_byte);
  read_exact(file_, sections_.mask_offset + first_byte, std::as_writable_bytes(std::span(bits)));
  for (size_t i = 0; i < tokens.size(); ++i) {
    const uint64_t token = begin + i;
    if ((bits[token / 8 - first_byte] >> (token % 8) & 1) == 0) tokens[i] = kNotTrained;
  }
}

void TokenMarks::document_begins(uint64_t begin, std::span<int32_t> out) const {
  CHECK(begin <= sections_.token_count && out.size() <= sections_.token_count - begin);
  std::fill(out.begin(), out.end(), 0);
  for (const uint64_t start : document_starts(begin, begin + out.size())) {
    std::fill(out.begin() + static_cast<ptrdiff_t>(start - begin), out.end(),
              static_cast<int32_t>(start - begin));
  }
}

uint64_t TokenMarks::document_start(uint64_t document) const {
  uint64_t start = 0;
  read_exact(file_, sections_.documents_offset + document * sizeof(start),
             std::as_writable_bytes(std::span(&start, 1)));
  return start;
}

std::vector<uint64_t> TokenMarks::document_starts(uint64_t begin, uint64_t end) const {
  uint64_t low = 0, high = sections_.document_count;  // the first start >= begin is among them
  while (low < high) {
    const uint64_t middle = low + (high - low) / 2;
    document_start(middle) < begin ? low = middle + 1 : high = middle;
  }
  // Starts are apart by a token at least.
  const uint64_t most = std::min(sections_.document_count - low, end - begin);
  std::vector<uint64_t> starts(most);
  constexpr uint64_t kBlock = 64;
  uint64_t count = 0;
  while (count < most) {
    const auto block = std::span(starts).subspan(count, std::min(kBlock, most - count));
    read_exact(file_, sections_.documents_offset + (low + count) * sizeof(uint64_t),
               std::as_writable_bytes(block));
    const auto beyond =
        std::find_if(block.begin(), block.end(), [&](uint64_t s) { return s >= end; });
    count += static_cast<uint64_t>(beyond - block.begin());
    if (beyond != block.end()) break;
  }
  starts.resize(count);
  return starts;
}

}  // namespace overspill
