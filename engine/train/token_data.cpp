// The order of sequences over token files: which file and which tokens the cursor-th one covers.
// Thread-safe after construction.
// Shuffling is a permutation computed per index, so that it takes no memory and a run resumes from
// its cursor alone.
#include "engine/train/token_data.h"

#include <algorithm>
#include <array>
#include <bit>
#include <utility>

#include "engine/base/error.h"
#include "engine/base/log.h"
#include "engine/base/random.h"
#include "engine/model/kernels.h"
#include "engine/train/token_marks.h"

namespace overspill {
namespace {

constexpr std::array<std::pair<TokenFormat, const char*>, 6> kFormatNames = {{
    {TokenFormat::automatic, "auto"},
    {TokenFormat::prepared, "prepared"},
    {TokenFormat::nanogpt, "nanogpt"},
    {TokenFormat::llmc, "llmc"},
    {TokenFormat::megatron, "megatron"},
    {TokenFormat::text, "text"},
}};

/// A permutation of [0, size): a Feistel network on the next even number of bits (Luby and Rackoff
/// 1988), walked along its cycle until it lands inside (Black and Rogaway 2002). The domain is at
/// most four times the size, so that the walk takes at most four steps on average.
uint64_t permute(uint64_t index, uint64_t size, uint64_t key) {
  constexpr uint64_t kRounds = 8;
  const uint64_t half_bits = std::max<uint64_t>(1, (std::bit_width(size - 1) + 1) / 2);
  const uint64_t mask = (uint64_t{1} << half_bits) - 1;
  uint64_t value = index;
  do {
    uint64_t left = value >> half_bits, right = value & mask;
    for (uint64_t round = 0; round < kRounds; ++round) {
      const uint64_t mixed = left ^ (random_bits(key, (round << 32) | right) & mask);
      left = std::exchange(right, mixed);
    }
    value = (left << half_bits) | right;
  } while (value >= size);
  return value;
}

}  // namespace

TokenFormat parse_token_format(const std::string& text) {
  std::string accepted;
  for (const auto& [format, name] : kFormatNames) {
    if (text == name) return format;
    accepted += (accepted.empty() ? "" : ", ") + std::string(name);
  }
  fail(ErrorCode::invalid_config, "dataset type \"{}\": expected one of {}", text, accepted);
}

const char* token_format_name(TokenFormat format) {
  const auto* found = std::find_if(kFormatNames.begin(), kFormatNames.end(),
                                   [&](const auto& entry) { return entry.first == format; });
  CHECK(found != kFormatNames.end());
  return found->second;
}

SequenceData::SequenceData(std::vector<std::unique_ptr<TokenFile>> files, const Options& options)
    : files_(std::move(files)), options_(options) {
  CHECK(options_.sequence_len > 0);
  CHECK(!files_.empty());
  uint64_t longest = 0;
  for (const auto& file : files_) {
    const uint64_t sequences = count_sequences(*file);
    if (sequences == 0) {
      log_warning("{}: {} tokens make no sequence of {} and a last target; not used",
                  file->path().string(), file->token_count(), options_.sequence_len);
    }
    longest = std::max(longest, file->token_count());
    first_.push_back(total_);
    total_ += sequences;
  }
  if (total_ == 0) {
    fail(ErrorCode::invalid_file,
         "{}: no dataset file holds the {} tokens that sequence_len {} needs (the longest has {}); "
         "reduce sequence_len or add data",
         files_.front()->path().string(), uint64_t{options_.sequence_len} + 1,
         options_.sequence_len, longest);
  }
}

uint64_t SequenceData::count_sequences(const TokenFile& file) const {
  const uint64_t prepared = file.marks() == nullptr ? 0 : file.marks()->sequence_len();
  if (prepared == 0) {
    // A sequence needs one token more than its inputs: the last target.
    return (std::max<uint64_t>(file.token_count(), 1) - 1) / options_.sequence_len;
  }
  if (prepared != options_.sequence_len) {
    fail(ErrorCode::invalid_file,
         "{}: prepared for sequences of {} tokens, sequence_len is {}; set sequence_len to {} or "
         "prepare the file again",
         file.path().string(), prepared, options_.sequence_len, prepared);
  }
  return file.token_count() / prepared;
}

bool SequenceData::marked() const {
  return std::ranges::any_of(files_, [](const auto& file) { return file->marks() != nullptr; });
}

uint64_t SequenceData::sequence_at(uint64_t cursor) const {
  const uint64_t epoch = cursor / total_, index = cursor % total_;
  return options_.shuffle ? permute(index, total_, random_bits(options_.seed, epoch)) : index;
}

void SequenceData::get(uint64_t cursor, std::span<int32_t> inputs, std::span<int32_t> targets,
                       std::span<int32_t> document_begins) const {
  const uint64_t length = options_.sequence_len;
  CHECK(inputs.size() == length && targets.size() == length);
  CHECK(document_begins.empty() || document_begins.size() == length);
  const uint64_t sequence = sequence_at(cursor);
  // The last file that begins at or before it: files without a sequence share their successor's.
  const auto next = std::upper_bound(first_.begin(), first_.end(), sequence);
  const auto position = static_cast<size_t>(next - first_.begin()) - 1;
  const uint64_t begin = (sequence - first_[position]) * length;
  const TokenFile& file = *files_[position];
  file.copy(begin, inputs);
  std::copy(inputs.begin() + 1, inputs.end(), targets.begin());
  const TokenMarks* const marks = file.marks();
  const bool ends = marks != nullptr && marks->sequence_len() != 0;
  if (ends) {
    targets.back() = kNotTrained;
  } else {
    file.copy(begin + length, targets.last(1));
  }
  if (marks == nullptr) {
    std::ranges::fill(document_begins, 0);
    return;
  }
  marks->mask(begin + 1, ends ? targets.first(length - 1) : targets);
  marks->document_begins(begin, document_begins);
}

}  // namespace overspill
