// Files of `overspill prepare`: what is read of them, and every way in which one can be wrong.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>

#include "engine/base/error.h"
#include "engine/base/random.h"
#include "engine/model/kernels.h"
#include "engine/train/token_data.h"
#include "engine/train/token_marks.h"
#include "nvme/integrity.h"
#include "tests/unit/engine/train/prepared_file.h"

namespace overspill {
namespace {

using namespace test;
namespace fs = std::filesystem;
using Ids = std::vector<int32_t>;

class TokenPrepared : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "overspill_prepared_XXXXXX").string();
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    directory_ = name;
  }
  void TearDown() override { fs::remove_all(directory_); }

  std::unique_ptr<TokenFile> open(const std::string& bytes, uint32_t vocab_size = 512,
                                  TokenFormat format = TokenFormat::automatic) const {
    const fs::path path = directory_ / fmt::format("{}.tokens", ++files_);
    std::ofstream(path, std::ios::binary) << bytes;
    return open_token_file({.path = path, .format = format, .vocab_size = vocab_size});
  }
  std::string refusal(const std::string& bytes, uint32_t vocab_size = 512) const {
    return refusal([&] { open(bytes, vocab_size, TokenFormat::prepared); });
  }
  static std::string refusal(const std::function<void()>& call) {
    try {
      call();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_file) << error.what();
      return error.what();
    }
    return "nothing was refused";
  }
  SequenceData sequences(const PreparedFile& file, uint32_t sequence_len) const {
    std::vector<std::unique_ptr<TokenFile>> files;
    files.push_back(open(file.bytes()));
    return SequenceData(std::move(files), {.sequence_len = sequence_len});
  }

  fs::path directory_;
  mutable int files_ = 0;
};

struct Sequence {
  Ids inputs, targets, begins;
  Sequence(const SequenceData& from, uint64_t cursor, size_t length)
      : inputs(length), targets(length), begins(length) {
    from.get(cursor, inputs, targets, begins);
  }
};

TEST(Crc32, IsZlibs) {
  const std::string text = "123456789";
  const auto bytes = std::as_bytes(std::span(text));
  EXPECT_EQ(crc32(bytes), 0xcbf43926u);
  EXPECT_EQ(crc32(bytes.subspan(4), crc32(bytes.first(4))), 0xcbf43926u);
  EXPECT_EQ(zlib_crc(text), 0xcbf43926u);
}

TEST_F(TokenPrepared, ReadsTheDocumentsExample) {
  const std::string bytes = example_file().bytes();
  EXPECT_EQ(bytes.size(), 16386u);
  EXPECT_EQ(bytes[8192], 0x4c);
  const auto file = open(bytes);
  EXPECT_EQ(file->format(), TokenFormat::prepared);
  EXPECT_EQ(file->token_count(), 8u);
  ASSERT_NE(file->marks(), nullptr);
  EXPECT_EQ(file->marks()->sequence_len(), 8u);
  const SequenceData data = sequences(example_file(), 8);
  EXPECT_TRUE(data.marked());
  ASSERT_EQ(data.size(), 1u);
  const Sequence s(data, 0, 8);
  EXPECT_EQ(s.inputs, Ids({1, 5, 6, 7, 1, 8, 9, 0}));
  EXPECT_EQ(s.targets, Ids({-1, 6, 7, -1, -1, 9, -1, -1}));
  EXPECT_EQ(s.begins, Ids({0, 0, 0, 0, 4, 4, 4, 7}));
}

TEST_F(TokenPrepared, WithoutAMaskAllButDocumentsFirstTokensAreTrained) {
  PreparedFile file = example_file();
  file.trained.clear();
  file.token_bytes = 4;
  const SequenceData data = sequences(file, 8);
  EXPECT_EQ(Sequence(data, 0, 8).targets, Ids({5, 6, 7, -1, 8, 9, -1, -1}));
}

TEST_F(TokenPrepared, AStreamIsCutAnywhere) {
  // Documents of 5, 1 and 5 tokens, in sequences of 4 and a last target.
  const PreparedFile file{.tokens = {10, 11, 12, 13, 14, 20, 30, 31, 32, 33, 34},
                          .starts = {0, 5, 6}};
  const SequenceData data = sequences(file, 4);
  ASSERT_EQ(data.size(), 2u);
  const Sequence first(data, 0, 4), second(data, 1, 4);
  EXPECT_EQ(first.targets, Ids({11, 12, 13, 14}));
  EXPECT_EQ(first.begins, Ids({0, 0, 0, 0}));
  EXPECT_EQ(second.inputs, Ids({14, 20, 30, 31}));
  EXPECT_EQ(second.targets, Ids({-1, -1, 31, 32}));
  EXPECT_EQ(second.begins, Ids({0, 1, 2, 2}));  // the first goes on from before
}

/// Random documents and masks, against a walk over all tokens.
TEST_F(TokenPrepared, EverySequenceOfARandomFile) {
  constexpr size_t kTokens = 3001, kLength = 37;
  PreparedFile file{.tokens = {}, .starts = {}};
  std::vector<size_t> begins;
  for (size_t t = 0; t < kTokens; ++t) {
    file.tokens.push_back(static_cast<uint32_t>(random_below(1, t, 256)));
    // Some stretches of one token a document, more than are read at once.
    const bool starts = t == 0 || (t > 700 && t < 900) || random_below(2, t, 12) == 0;
    if (starts) file.starts.push_back(t);
    begins.push_back(file.starts.back());
    file.trained.push_back(!starts && random_below(3, t, 3) > 0);
  }
  const SequenceData data = sequences(file, kLength);
  ASSERT_EQ(data.size(), (kTokens - 1) / kLength);
  for (uint64_t s = 0; s < data.size(); ++s) {
    const Sequence got(data, s, kLength);
    for (size_t i = 0, t = s * kLength; i < kLength; ++i, ++t) {
      ASSERT_EQ(got.inputs[i], static_cast<int32_t>(file.tokens[t]));
      const auto next = static_cast<int32_t>(file.tokens[t + 1]);
      ASSERT_EQ(got.targets[i], file.trained[t + 1] ? next : kNotTrained) << t;
      const size_t begin = std::max(begins[t], s * kLength) - s * kLength;
      ASSERT_EQ(got.begins[i], static_cast<int32_t>(begin)) << t;
    }
  }
}

TEST_F(TokenPrepared, OtherFilesBesideOneHaveOneDocument) {
  std::vector<std::unique_ptr<TokenFile>> files;
  files.push_back(open(example_file().bytes()));
  files.push_back(open(std::string(34, '\1')));  // 17 tokens of nanoGPT's format
  const SequenceData data(std::move(files), {.sequence_len = 8});
  EXPECT_TRUE(data.marked());
  ASSERT_EQ(data.size(), 3u);
  const Sequence plain(data, 2, 8);
  EXPECT_EQ(plain.targets, Ids(8, 0x101));
  EXPECT_EQ(plain.begins, Ids(8, 0));
}

TEST_F(TokenPrepared, RefusesAnotherSequenceLength) {
  EXPECT_NE(refusal([&] {
              sequences(example_file(), 4);
            }).find("prepared for sequences of 8 tokens, sequence_len is 4; set sequence_len to 8"),
            std::string::npos);
}

TEST_F(TokenPrepared, RefusesTokensBeyondTheVocabulary) {
  EXPECT_NE(refusal(example_file().bytes(), 9).find("token 6 is 9, expected 0 to 8"),
            std::string::npos);
  PreparedFile file = example_file();
  file.vocab_size = 8;
  EXPECT_NE(refusal(file.bytes()).find("token 5 is 8, expected 0 to 7"), std::string::npos);
}

struct Damage {
  const char* name;
  std::function<void(std::string&)> apply;
  const char* message;
  bool sign = true;  ///< the header's checksum again
};

template <class Value>
std::function<void(std::string&)> set(size_t offset, Value value) {
  return [=](std::string& file) { put_value(file, offset, value); };
}
/// Sets a value and the checksum of its section.
std::function<void(std::string&)> set_in(size_t section, size_t bytes, size_t crc_field,
                                         size_t offset, uint64_t value, size_t width) {
  return [=](std::string& file) {
    std::memcpy(file.data() + section + offset, &value, width);
    put_value(file, crc_field, zlib_crc(std::string_view(file).substr(section, bytes)));
  };
}
std::function<void(std::string&)> set_mask(uint8_t bits) {
  return set_in(8192, 1, 116, 0, bits, 1);
}
std::function<void(std::string&)> set_start(size_t index, uint64_t value) {
  return set_in(12288, 32, 120, index * 8, value, 8);
}

const Damage kDamages[] = {
    {"cut_in_the_header", [](std::string& f) { f.resize(255); },
     "header truncated: 255 bytes, expected 256", false},
    {"cut_in_the_tokens", [](std::string& f) { f.resize(4100); },
     "4100 bytes long, the header says 16386; the file is truncated", false},
    {"cut_at_the_end", [](std::string& f) { f.pop_back(); },
     "16385 bytes long, the header says 16386; the file is truncated", false},
    {"too_long", [](std::string& f) { f += "x"; },
     "16387 bytes long, the header says 16386; the file is too long", false},
    {"magic", set(0, 'o'), "does not begin with \"OSPTOKEN\"", false},
    {"version", set(8, 2u), "version 2 of the format, expected 1", false},
    {"header_checksum", set(60, 3u), "header: checksum 0x", false},
    {"header_bytes", set(12, 255u), "header: header_bytes is 255, expected 256"},
    {"token_bytes", set(16, 3u), "header: token_bytes is 3, expected 2 or 4"},
    {"flags", set(20, 3u), "header: flags is 3, expected 0 or 1"},
    {"no_tokens", set(24, uint64_t{0}), "header: token_count is 0"},
    {"very_many_tokens", set(24, ~uint64_t{0}), "header: token_count is 18446744073709551615"},
    {"other_tokens", set(24, uint64_t{5000}), "header: mask_offset is 8192"},
    {"no_documents", set(32, uint64_t{0}), "header: document_count is 0"},
    {"many_documents", set(32, uint64_t{9}), "header: document_count is 9"},
    {"sequence_len", set(40, uint64_t{3}), "header: sequence_len is 3"},
    {"trained_count", set(48, uint64_t{6}), "header: trained_count is 6"},
    {"vocab_size", set(56, 0u), "header: vocab_size is 0"},
    {"tokens_offset", set(64, uint64_t{256}), "header: tokens_offset is 256"},
    {"documents_offset", set(80, uint64_t{8192}), "header: documents_offset is 8192"},
    {"metadata_offset", set(88, uint64_t{0}), "header: metadata_offset is 0"},
    {"metadata_bytes", set(96, ~uint64_t{0}), "header: metadata_bytes is 18446744073709551615"},
    {"file_bytes", set(104, uint64_t{16387}), "header: file_bytes is 16387"},
    {"reserved", set(200, 'x'), "header: a reserved byte is 120, expected 0"},
    {"tokens_checksum", set(4096, uint16_t{60000}), "tokens: checksum 0x", false},
    {"mask_checksum", set(8192, 'x'), "mask: checksum 0x", false},
    {"starts_checksum", set(12288, 'x'), "document starts: checksum 0x", false},
    {"metadata_checksum", set(16384, 'x'), "metadata: checksum 0x", false},
    {"mask_count", set_mask(0x44), "mask: 2 tokens are trained on, the header says 3"},
    {"mask_of_a_first_token", set_mask(0x1c),
     "mask: token 4 is trained on, but is the first of document 1"},
    {"first_start", set_start(0, 1), "document starts: entry 0 of 3 is 1"},
    {"equal_starts", set_start(2, 4), "document starts: entry 2 of 3 is 4 behind 4"},
    {"start_beyond", set_start(2, 8), "document starts: entry 2 of 3 is 8 behind 4"},
    {"last_start", set_start(3, 9), "document starts: entry 3 of 3 is 9 behind 7"},
    {"sequence_crossed", set(40, uint64_t{2}),
     "document starts: document 0, tokens 0 to 3, crosses the end of a sequence of 2"},
};

class TokenDamage : public TokenPrepared, public testing::WithParamInterface<Damage> {};

TEST_P(TokenDamage, IsNamed) {
  const Damage& damage = GetParam();
  std::string file = example_file().bytes();
  damage.apply(file);
  if (damage.sign) sign_header(file);
  const std::string message = refusal(file);
  EXPECT_NE(message.find(damage.message), std::string::npos) << message;
  EXPECT_NE(message.find(directory_.string()), std::string::npos) << message;
}

INSTANTIATE_TEST_SUITE_P(All, TokenDamage, testing::ValuesIn(kDamages),
                         [](const auto& test) { return std::string(test.param.name); });

TEST_F(TokenPrepared, BitsBehindTheLastTokenAreRefused) {
  const PreparedFile file{.tokens = {1, 2, 3}, .starts = {0}, .trained = {0, 1, 0}};
  std::string bytes = file.bytes();
  set_in(8192, 1, 116, 0, 0x8, 1)(bytes);
  sign_header(bytes);
  EXPECT_NE(refusal(bytes).find("mask: bits are set behind the last token"), std::string::npos);
}

}  // namespace
}  // namespace overspill
