// The order of sequences: which tokens a cursor names, and that shuffling is a permutation.
#include "engine/train/token_data.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <set>

#include "engine/base/error.h"

namespace overspill {
namespace {

/// Token i is first + i.
class CountingFile final : public TokenFile {
 public:
  CountingFile(uint64_t count, int32_t first) : count_(count), first_(first) {}
  uint64_t token_count() const override { return count_; }
  TokenFormat format() const override { return TokenFormat::nanogpt; }
  const std::filesystem::path& path() const override { return path_; }
  void copy(uint64_t begin, std::span<int32_t> out) const override {
    ASSERT_LE(begin + out.size(), count_);
    std::iota(out.begin(), out.end(), first_ + static_cast<int32_t>(begin));
  }

 private:
  uint64_t count_;
  int32_t first_;
  std::filesystem::path path_ = "counting.bin";
};

/// Files of these lengths; file f begins with token 1000 f.
SequenceData make_sequences(const std::vector<uint64_t>& lengths,
                            const SequenceData::Options& options) {
  std::vector<std::unique_ptr<TokenFile>> files;
  for (size_t i = 0; i < lengths.size(); ++i) {
    files.push_back(std::make_unique<CountingFile>(lengths[i], static_cast<int32_t>(i) * 1000));
  }
  return SequenceData(std::move(files), options);
}

std::vector<uint64_t> epoch_order(uint64_t count, uint64_t seed, uint64_t epoch) {
  const SequenceData sequences =
      make_sequences({count + 1}, {.sequence_len = 1, .shuffle = true, .seed = seed});
  std::vector<uint64_t> order;
  for (uint64_t i = 0; i < count; ++i) order.push_back(sequences.sequence_at(epoch * count + i));
  return order;
}

TEST(SequenceData, CoversTokensInFileOrderWithShiftedTargets) {
  // 9 tokens: sequences [0, 4] and [4, 8]; 8 tokens: only one, since its second lacks a target.
  const SequenceData sequences = make_sequences({9, 8}, {.sequence_len = 4});
  ASSERT_EQ(sequences.size(), 3u);
  const std::vector<int32_t> firsts = {0, 4, 1000};
  for (uint64_t cursor = 0; cursor < 7; ++cursor) {
    std::vector<int32_t> inputs(4), targets(4), expected(4);
    sequences.get(cursor, inputs, targets);
    std::iota(expected.begin(), expected.end(), firsts[cursor % 3]);
    EXPECT_EQ(inputs, expected) << cursor;
    std::iota(expected.begin(), expected.end(), firsts[cursor % 3] + 1);
    EXPECT_EQ(targets, expected) << cursor;
  }
}

TEST(SequenceData, PassesOverFilesThatAreTooShort) {
  const SequenceData sequences = make_sequences({4, 5, 1, 3, 9, 2}, {.sequence_len = 4});
  ASSERT_EQ(sequences.size(), 3u);
  std::vector<int32_t> inputs(4), targets(4), begins;
  for (uint64_t cursor = 0; cursor < 3; ++cursor) {
    sequences.get(cursor, inputs, targets);
    begins.push_back(inputs[0]);
  }
  EXPECT_EQ(begins, (std::vector<int32_t>{1000, 4000, 4004}));
}

TEST(SequenceData, RefusesFilesWithoutOneSequence) {
  try {
    make_sequences({4, 3}, {.sequence_len = 4});
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_file);
    EXPECT_NE(
        std::string(error.what())
            .find("counting.bin: no dataset file holds the 5 tokens that sequence_len 4 needs (the "
                  "longest has 4); reduce sequence_len"),
        std::string::npos)
        << error.what();
  }
}

TEST(SequenceData, ShufflesEveryEpochAsAPermutation) {
  for (uint64_t count = 1; count <= 200; ++count) {
    for (uint64_t epoch = 0; epoch < 3; ++epoch) {
      std::vector<uint64_t> order = epoch_order(count, 42, epoch), all(count);
      std::iota(all.begin(), all.end(), 0u);
      std::sort(order.begin(), order.end());
      ASSERT_EQ(order, all) << count << " sequences, epoch " << epoch;
    }
  }
}

TEST(SequenceData, ShufflesDifferentlyInEveryEpochAndSeed) {
  std::set<std::vector<uint64_t>> orders;
  for (uint64_t seed = 0; seed < 5; ++seed) {
    for (uint64_t epoch = 0; epoch < 5; ++epoch) orders.insert(epoch_order(100, seed, epoch));
  }
  EXPECT_EQ(orders.size(), 25u);
  EXPECT_EQ(epoch_order(100, 3, 2), epoch_order(100, 3, 2));
}

// Over 5040 epochs of 7 sequences, each sequence should come in each place 720 times; the bound is
// six standard deviations of a binomial count.
TEST(SequenceData, ShufflesWithoutAPreferredPlace) {
  constexpr uint64_t kCount = 7, kEpochs = 5040;
  std::array<std::array<int, kCount>, kCount> seen{};
  const SequenceData sequences =
      make_sequences({kCount + 1}, {.sequence_len = 1, .shuffle = true, .seed = 1});
  for (uint64_t cursor = 0; cursor < kCount * kEpochs; ++cursor) {
    ++seen[cursor % kCount][sequences.sequence_at(cursor)];
  }
  for (const auto& place : seen) {
    for (const int count : place) EXPECT_NEAR(count, 720, 6 * 24.9);
  }
}

TEST(SequenceData, ShufflesAcrossFiles) {
  const SequenceData sequences =
      make_sequences({101, 101}, {.sequence_len = 1, .shuffle = true, .seed = 5});
  std::vector<int32_t> input(1), target(1);
  int from_second = 0;
  for (uint64_t cursor = 0; cursor < 100; ++cursor) {
    sequences.get(cursor, input, target);
    EXPECT_EQ(target[0], input[0] + 1);
    from_second += input[0] >= 1000;
  }
  EXPECT_GT(from_second, 20);
  EXPECT_LT(from_second, 80);
}

TEST(SequenceData, DiesOnSpansOfAnotherLength) {
  const SequenceData sequences = make_sequences({9}, {.sequence_len = 4});
  std::vector<int32_t> three(3), four(4);
  EXPECT_DEATH(sequences.get(0, three, four), "CHECK");
  EXPECT_DEATH(sequences.get(0, four, three), "CHECK");
}

}  // namespace
}  // namespace overspill
