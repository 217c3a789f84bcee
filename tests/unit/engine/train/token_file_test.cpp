// Token files: every format is found out by its content, and every refusal says what to do.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "engine/base/error.h"
#include "engine/train/token_data.h"

namespace overspill {
namespace {

namespace fs = std::filesystem;

testing::AssertionResult contains(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "\"" << text << "\" lacks \"" << part << "\"";
}

/// The values' bytes, little-endian.
template <class Value>
std::string pack(std::initializer_list<Value> values) {
  std::string bytes(values.size() * sizeof(Value), '\0');
  if (values.size() > 0) std::memcpy(bytes.data(), values.begin(), bytes.size());
  return bytes;
}

std::string llmc_header(uint32_t magic, uint32_t version, uint32_t count) {
  std::string header = pack<uint32_t>({magic, version, count});
  header.resize(1024, '\0');
  return header;
}

struct MegatronIndex {
  uint64_t version = 1;
  uint8_t type = 8;  // uint16
  std::vector<int32_t> sizes;
  std::vector<int64_t> pointers;
  std::vector<int64_t> documents = {};

  std::string bytes() const {
    std::string text("MMIDIDX\0\0", 9);
    text += pack<uint64_t>({version}) + pack<uint8_t>({type});
    text += pack<uint64_t>({sizes.size(), documents.size()});
    for (const int32_t size : sizes) text += pack<int32_t>({size});
    for (const int64_t pointer : pointers) text += pack<int64_t>({pointer});
    for (const int64_t document : documents) text += pack<int64_t>({document});
    return text;
  }
};

fs::path test_data() {
  const char* given = std::getenv("OVERSPILL_TEST_DATA");
  return given != nullptr ? given : OVERSPILL_SOURCE_DIR "/../shared/data";
}

std::vector<int32_t> all_tokens(const TokenFile& file) {
  std::vector<int32_t> tokens(file.token_count());
  file.copy(0, tokens);
  return tokens;
}

class TokenFileTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "overspill_tokens_XXXXXX").string();
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    directory_ = name;
    path_ = directory_ / "train.bin";
  }
  void TearDown() override { fs::remove_all(directory_); }

  void write(const std::string& bytes, const std::string& name = "train.bin") const {
    std::ofstream(directory_ / name, std::ios::binary) << bytes;
  }
  std::unique_ptr<TokenFile> open(TokenFormat format = TokenFormat::automatic) const {
    return open_token_file(
        {.path = path_, .format = format, .vocab_size = 512, .byte_tokenizer = byte_tokenizer_});
  }
  std::string refusal(TokenFormat format = TokenFormat::automatic,
                      ErrorCode code = ErrorCode::invalid_file) const {
    try {
      open(format);
    } catch (const Error& error) {
      EXPECT_STREQ(error_code_name(error.code()), error_code_name(code)) << error.what();
      EXPECT_TRUE(contains(error.what(), directory_.string()));
      return error.what();
    }
    ADD_FAILURE() << "nothing was refused";
    return "";
  }
  void write_pair(const MegatronIndex& index, const std::string& bin) const {
    write(index.bytes(), "train.idx");
    write(bin);
  }

  fs::path directory_, path_;
  bool byte_tokenizer_ = false;
};

TEST(TokenFormatName, ParsesItsOwnNames) {
  for (const TokenFormat format :
       {TokenFormat::automatic, TokenFormat::prepared, TokenFormat::nanogpt, TokenFormat::llmc,
        TokenFormat::megatron, TokenFormat::text}) {
    EXPECT_EQ(parse_token_format(token_format_name(format)), format);
  }
  try {
    parse_token_format("parquet");
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_config);
    EXPECT_TRUE(contains(error.what(),
                         "dataset type \"parquet\": expected one of auto, prepared, "
                         "nanogpt, llmc, megatron, text"));
  }
}

TEST_F(TokenFileTest, ReadsNanogpt) {
  write(pack<uint16_t>({1, 511, 0, 7}));
  const auto file = open();
  EXPECT_EQ(file->format(), TokenFormat::nanogpt);
  EXPECT_EQ(file->path(), path_);
  EXPECT_EQ(all_tokens(*file), (std::vector<int32_t>{1, 511, 0, 7}));
  std::vector<int32_t> middle(2);
  file->copy(1, middle);
  EXPECT_EQ(middle, (std::vector<int32_t>{511, 0}));
}

// More tokens than one block of the scan or of a copy holds.
TEST_F(TokenFileTest, ReadsFilesOfManyBlocks) {
  std::string bytes;
  for (uint32_t i = 0; i < 700'001; ++i) bytes += pack<uint16_t>({uint16_t(i * 2654435761u >> 23)});
  write(bytes);
  const auto file = open();
  const std::vector<int32_t> tokens = all_tokens(*file);
  ASSERT_EQ(tokens.size(), 700'001u);
  for (uint32_t i = 0; i < tokens.size(); ++i) {
    ASSERT_EQ(tokens[i], static_cast<int32_t>(i * 2654435761u >> 23)) << i;
  }
  bytes.replace(2 * 650'000, 2, pack<uint16_t>({512}));
  write(bytes);
  EXPECT_TRUE(contains(refusal(), "token 650000 is 512, expected 0 to 511 for a vocabulary of"));
}

TEST_F(TokenFileTest, DiesWhenReadingBeyondTheEnd) {
  write(pack<uint16_t>({1, 2}));
  const auto file = open();
  std::vector<int32_t> out(2);
  EXPECT_DEATH(file->copy(1, out), "CHECK");
}

TEST_F(TokenFileTest, ReportsTokensThatAppearAfterOpening) {
  write(pack<uint16_t>({1, 2, 3}));
  const auto file = open();
  write(pack<uint16_t>({1, 2, 600}));
  std::vector<int32_t> out(3);
  try {
    file->copy(0, out);
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_TRUE(contains(error.what(), "token 2 is 600"));
  }
}

TEST_F(TokenFileTest, RefusesFilesThatHoldNothing) {
  EXPECT_TRUE(contains(refusal(TokenFormat::automatic, ErrorCode::not_found),
                       "no such file, and no Megatron dataset of this prefix"));
  write("");
  EXPECT_TRUE(contains(refusal(), "train.bin: empty; give a file"));
  path_ = directory_;
  EXPECT_TRUE(contains(refusal(), "not a regular file"));
}

TEST_F(TokenFileTest, RefusesOddLengths) {
  write(std::string("\x01\0\x02", 3));
  EXPECT_TRUE(contains(refusal(), "3 bytes long, expected an even number for nanoGPT's 16-bit"));
}

TEST_F(TokenFileTest, NamesTheFirstTokenOutOfRange) {
  write(pack<uint16_t>({0, 511, 513, 600}));
  EXPECT_TRUE(contains(refusal(),
                       "train.bin: token 2 is 513, expected 0 to 511 for a vocabulary "
                       "of 512; the file was read as nanogpt: tokenize for this model"));
}

TEST_F(TokenFileTest, ReadsBothLlmcVersions) {
  write(llmc_header(20240520, 1, 3) + pack<uint16_t>({5, 6, 7}));
  EXPECT_EQ(open()->format(), TokenFormat::llmc);
  EXPECT_EQ(all_tokens(*open()), (std::vector<int32_t>{5, 6, 7}));
  write(llmc_header(20240801, 7, 2) + pack<uint32_t>({8, 511}));
  EXPECT_EQ(open()->format(), TokenFormat::llmc);
  EXPECT_EQ(all_tokens(*open()), (std::vector<int32_t>{8, 511}));
}

TEST_F(TokenFileTest, RefusesBadLlmcFiles) {
  write(llmc_header(20240520, 7, 0));
  EXPECT_TRUE(contains(refusal(), "llm.c version 7 with magic 20240520, expected version 1"));
  write(llmc_header(20240801, 1, 0));
  EXPECT_TRUE(contains(refusal(), "llm.c version 1 with magic 20240801, expected version 7"));
  write(llmc_header(20240520, 1, 0).substr(0, 1000));
  EXPECT_TRUE(contains(refusal(), "llm.c header truncated: 1000 bytes, expected 1024"));
  write(llmc_header(20240520, 1, 3) + pack<uint16_t>({5, 6}));
  EXPECT_TRUE(contains(refusal(),
                       "the header says 3 tokens (6 bytes), but 4 bytes follow it; the "
                       "file is truncated"));
  write(llmc_header(20240520, 1, 1) + pack<uint16_t>({5, 6}));
  EXPECT_TRUE(contains(refusal(), "the file is too long"));
  write(llmc_header(20240520, 1, 0));
  EXPECT_TRUE(contains(refusal(), "holds no tokens"));
  write(pack<uint16_t>({1, 2}));
  EXPECT_TRUE(contains(refusal(TokenFormat::llmc), "does not begin with llm.c's magic number"));
  write(llmc_header(20240801, 7, 1) + pack<uint32_t>({0xffffffff}));
  EXPECT_TRUE(contains(refusal(), "token 0 is 4294967295, expected 0 to 511"));
}

TEST_F(TokenFileTest, FollowsMegatronPointers) {
  // The second sequence lies first in the file, and the third is empty.
  const MegatronIndex index{.sizes = {2, 3, 0, 1}, .pointers = {6, 0, 4, 10}, .documents = {0, 4}};
  write_pair(index, pack<uint16_t>({1, 2, 3, 4, 5, 6}));
  for (const char* name : {"train.bin", "train.idx", "train"}) {
    path_ = directory_ / name;
    const auto file = open();
    EXPECT_EQ(file->format(), TokenFormat::megatron);
    EXPECT_EQ(all_tokens(*file), (std::vector<int32_t>{4, 5, 1, 2, 3, 6})) << name;
    std::vector<int32_t> across(3);
    file->copy(1, across);
    EXPECT_EQ(across, (std::vector<int32_t>{5, 1, 2}));
  }
}

TEST_F(TokenFileTest, ReadsEveryMegatronIntegerType) {
  const std::map<uint8_t, std::string> files = {
      {1, pack<uint8_t>({1, 127})}, {2, pack<int8_t>({1, 127})},  {3, pack<int16_t>({1, 127})},
      {4, pack<int32_t>({1, 127})}, {5, pack<int64_t>({1, 127})}, {8, pack<uint16_t>({1, 127})}};
  for (const auto& [type, bytes] : files) {
    write_pair({.type = type, .sizes = {2}, .pointers = {0}}, bytes);
    EXPECT_EQ(all_tokens(*open()), (std::vector<int32_t>{1, 127})) << int{type};
  }
}

TEST_F(TokenFileTest, RefusesNegativeTokensOfEveryWidth) {
  const std::map<uint8_t, std::string> files = {{2, pack<int8_t>({1, -1})},
                                                {3, pack<int16_t>({1, -1})},
                                                {4, pack<int32_t>({1, -1})},
                                                {5, pack<int64_t>({1, -1})}};
  for (const auto& [type, bytes] : files) {
    write_pair({.type = type, .sizes = {2}, .pointers = {0}}, bytes);
    EXPECT_TRUE(contains(refusal(), "token 1 is -1, expected 0 to 511")) << int{type};
  }
}

TEST_F(TokenFileTest, RefusesBadMegatronHeaders) {
  const std::string bin = pack<uint16_t>({1, 2});
  write_pair({.version = 2, .sizes = {2}, .pointers = {0}}, bin);
  EXPECT_TRUE(contains(refusal(), "train.idx: index version 2, expected 1"));
  for (const int type : {6, 7}) {
    write_pair({.type = static_cast<uint8_t>(type), .sizes = {2}, .pointers = {0}}, bin);
    EXPECT_TRUE(contains(refusal(), "dtype code " + std::to_string(type) + " (floating point), e"));
  }
  for (const int type : {0, 9, 255}) {
    write_pair({.type = static_cast<uint8_t>(type), .sizes = {2}, .pointers = {0}}, bin);
    EXPECT_TRUE(contains(refusal(), "dtype code " + std::to_string(type) + ", expected 1 to 5"));
  }
  write(std::string("MMIDIDX\0\0\1", 10), "train.idx");
  EXPECT_TRUE(contains(refusal(), "index truncated: 10 bytes, expected at least 34"));
  write("TNTIDX\0\0", "train.idx");
  EXPECT_TRUE(contains(refusal(TokenFormat::megatron), "does not begin with Megatron's magic"));
  EXPECT_EQ(open()->format(), TokenFormat::nanogpt);
}

TEST_F(TokenFileTest, RefusesMegatronFilesThatDoNotMatch) {
  const std::string bin = pack<uint16_t>({1, 2, 3, 4});
  const MegatronIndex whole{.sizes = {4}, .pointers = {0}};
  write(whole.bytes().substr(0, 40), "train.idx");
  write(bin);
  EXPECT_TRUE(contains(refusal(), "index is truncated: 40 bytes for 1 sequences and 0 documents"));
  write(whole.bytes() + "x", "train.idx");
  EXPECT_TRUE(contains(refusal(), "index is too long"));
  write_pair({.sizes = {4, 1}, .pointers = {0, 8}}, bin);
  EXPECT_TRUE(contains(refusal(), "sequence 1 has 1 tokens at byte 8, which is outside"));
  write_pair({.sizes = {-1}, .pointers = {0}}, bin);
  EXPECT_TRUE(contains(refusal(), "sequence 0 has -1 tokens at byte 0"));
  write_pair({.sizes = {4}, .pointers = {-2}}, bin);
  EXPECT_TRUE(contains(refusal(), "sequence 0 has 4 tokens at byte -2"));
  write_pair({.sizes = {3}, .pointers = {0}}, bin);
  EXPECT_TRUE(contains(refusal(), "its sequences take 6 bytes, but "));
  write_pair({.sizes = {4}, .pointers = {0}, .documents = {0, 2}}, bin);
  EXPECT_TRUE(contains(refusal(), "document 1 begins at sequence 2, expected 0 to 1"));
  write_pair({.sizes = {4}, .pointers = {0}, .documents = {1, 0}}, bin);
  EXPECT_TRUE(contains(refusal(), "document 1 begins at sequence 0, expected 1 to 1"));
  fs::remove(path_);
  EXPECT_TRUE(contains(refusal(TokenFormat::automatic, ErrorCode::not_found),
                       "train.bin: no such file; a Megatron dataset is a .bin and an .idx"));
}

TEST_F(TokenFileTest, ReadsTextAsBytes) {
  byte_tokenizer_ = true;
  write("A\t\xc3\xa9\n");
  EXPECT_EQ(open()->format(), TokenFormat::text);
  EXPECT_EQ(all_tokens(*open()), (std::vector<int32_t>{68, 12, 198, 172, 13}));
}

TEST_F(TokenFileTest, ChecksTextTokensAgainstTheVocabulary) {
  write("ab\xc3\xa9");
  try {
    open_token_file({.path = path_, .vocab_size = 0xc3 + 3, .byte_tokenizer = true});
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_TRUE(contains(error.what(),
                         "token 2 is 198, expected 0 to 197 for a vocabulary of "
                         "198; the file was read as text"));
  }
}

TEST_F(TokenFileTest, SaysHowToTokenizeText) {
  write("Once upon a time");
  for (const TokenFormat format : {TokenFormat::automatic, TokenFormat::text}) {
    EXPECT_TRUE(contains(refusal(format),
                         "text, and this model has no byte tokenizer; turn it "
                         "into tokens first, with nanoGPT's data/*/prepare.py"));
  }
}

TEST_F(TokenFileTest, RefusesWhatIsNotUtf8AsText) {
  byte_tokenizer_ = true;
  for (const std::string bad : {"\xc3(", "\xe0\x80\x80", "\xed\xa0\x80", "\xf5", "\xf4\x90\x80\x80",
                                "\xf0\x80\x80\x80", "\xc0\xaf", "\x80", "\x01", "\x7f", "\x1b"}) {
    write("0123" + bad + "9");
    const std::string message = refusal(TokenFormat::text);
    EXPECT_TRUE(contains(message, "is not UTF-8 text; convert the file to UTF-8"));
    EXPECT_TRUE(contains(message, bad.size() == 1 ? "at offset 4 " : "at offset 5 ") ||
                contains(message, "byte 0xc0 at offset 4 "));
  }
  write("0123\xe2\x82");
  EXPECT_TRUE(contains(refusal(TokenFormat::text), "text ends inside a UTF-8 character"));
  for (const std::string good : {"\xed\x9f\xbf", "\xf4\x8f\xbf\xbf", "\xe0\xa0\x80", "\xc2\x80",
                                 "\xef\xbb\xbf", "\r\f", "\xf0\x90\x80\x80"}) {
    write(good);
    EXPECT_EQ(open()->token_count(), good.size());
  }
}

// A Latin-1 text read as 16-bit tokens would pass for a vocabulary of 32000 and train on nonsense.
TEST_F(TokenFileTest, DoesNotTakeDamagedTextForTokens) {
  write(std::string(99, 'a') + "\xe9");
  EXPECT_TRUE(contains(refusal(), "text ends inside a UTF-8 character"));
  write(std::string(99, 'a') + "\xe9 la mode");
  EXPECT_TRUE(contains(refusal(), "byte 0x20 at offset 100 is not UTF-8 text; convert the file"));
}

TEST_F(TokenFileTest, ObeysAnExplicitFormat) {
  write(std::string("\x41\0\x42\0", 4));
  EXPECT_TRUE(contains(refusal(TokenFormat::text), "byte 0x00 at offset 1"));
  write(llmc_header(20240520, 1, 0));
  EXPECT_TRUE(contains(refusal(TokenFormat::nanogpt), "token 0 is 55432"));
}

TEST_F(TokenFileTest, ReadsRealFilesOfEveryFormatAlike) {
  const fs::path formats = test_data() / "formats";
  if (!fs::exists(formats)) GTEST_SKIP() << "no " << formats << "; set OVERSPILL_TEST_DATA";
  std::ifstream stream(formats / "expected.json");
  const auto expected = nlohmann::json::parse(stream);
  const std::map<std::string, TokenFormat> files = {
      {"nanogpt_train.bin", TokenFormat::nanogpt},
      {"llmc_gpt2style_u16.bin", TokenFormat::llmc},
      {"llmc_llama3style_u32.bin", TokenFormat::llmc},
      {"megatron_text_document", TokenFormat::megatron},
      {"megatron_text_document.bin", TokenFormat::megatron},
      {"megatron_text_document.idx", TokenFormat::megatron}};
  std::vector<int32_t> first;
  for (const auto& [name, format] : files) {
    path_ = formats / name;
    const auto file = open();
    EXPECT_EQ(file->format(), format) << name;
    const std::vector<int32_t> tokens = all_tokens(*file);
    ASSERT_EQ(tokens.size(), expected.at("tokens").get<size_t>()) << name;
    EXPECT_EQ(std::vector<int32_t>(tokens.begin(), tokens.begin() + 16),
              expected.at("first16").get<std::vector<int32_t>>());
    EXPECT_EQ(std::vector<int32_t>(tokens.end() - 8, tokens.end()),
              expected.at("last8").get<std::vector<int32_t>>());
    if (first.empty()) first = tokens;
    EXPECT_EQ(tokens, first) << name;
  }
}

TEST_F(TokenFileTest, ReadsRealTexts) {
  const fs::path texts = test_data() / "text";
  if (!fs::exists(texts)) GTEST_SKIP() << "no " << texts << "; set OVERSPILL_TEST_DATA";
  byte_tokenizer_ = true;
  int count = 0;
  for (const auto& entry : fs::directory_iterator(texts)) {
    path_ = entry.path();
    const auto file = open();
    EXPECT_EQ(file->format(), TokenFormat::text) << path_;
    EXPECT_EQ(file->token_count(), entry.file_size()) << path_;
    ++count;
  }
  EXPECT_GT(count, 0);
}

}  // namespace
}  // namespace overspill
