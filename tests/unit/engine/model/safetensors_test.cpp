// Reading safetensors files: what is read back, and every refusal's message.
#include "tests/unit/engine/model/safetensors_fixture.h"

#include <cmath>
#include <numeric>

namespace overspill {
namespace {

using namespace test;

class SafetensorsFileTest : public TemporaryDirectory {};

TEST_F(SafetensorsFileTest, ListsTensorsInFileOrder) {
  write_bytes(path_, file_bytes(kTwoTensors, 11));
  const SafetensorsFile file(path_);
  ASSERT_EQ(file.entries().size(), 2u);
  EXPECT_EQ(file.entries()[0].spec.name, "a");
  EXPECT_EQ(file.entries()[0].spec.shape, (std::vector<uint64_t>{1, 2}));
  EXPECT_EQ(file.entries()[0].spec.dtype, "F32");
  EXPECT_EQ(file.entries()[0].file_offset, 8 + std::strlen(kTwoTensors));
  EXPECT_EQ(file.find("b"), &file.entries()[1]);
  EXPECT_EQ(file.find("c"), nullptr);
  EXPECT_EQ(file.metadata(), (Strings{{"format", "pt"}}));
}

TEST_F(SafetensorsFileTest, ReadsRawElementsFromTheMiddle) {
  write_bytes(path_, file_bytes(kTwoTensors, 11));
  const SafetensorsFile file(path_);
  std::array<std::byte, 2> out{};
  file.read_raw(*file.find("b"), 1, out);
  EXPECT_EQ(out, (std::array{std::byte{9}, std::byte{10}}));
}

TEST_F(SafetensorsFileTest, AcceptsEmptyFilesScalarsAndEmptyTensors) {
  write_bytes(path_, file_bytes("{}", 0));
  EXPECT_TRUE(SafetensorsFile(path_).entries().empty());
  write_bytes(path_, file_bytes(R"({"scalar":{"dtype":"F16","shape":[],"data_offsets":[0,2]},)"
                                R"("empty":{"dtype":"I64","shape":[0,9],"data_offsets":[0,0]},)"
                                R"("last":{"dtype":"I8","shape":[0],"data_offsets":[2,2]}})",
                                2));
  const SafetensorsFile file(path_);
  EXPECT_EQ(file.find("scalar")->spec.elements(), 1u);
  EXPECT_EQ(file.find("empty")->spec.bytes(), 0u);
}

TEST_F(SafetensorsFileTest, KnowsEveryTypeOfTheSpecification) {
  const std::map<std::string, int> sizes = {{"BOOL", 1},    {"U8", 1},      {"I8", 1},   {"I16", 2},
                                            {"U16", 2},     {"F16", 2},     {"BF16", 2}, {"I32", 4},
                                            {"U32", 4},     {"F32", 4},     {"F64", 8},  {"I64", 8},
                                            {"F8_E4M3", 1}, {"F8_E5M2", 1}, {"U64", 8}};
  for (const auto& [name, bytes] : sizes) {
    write_bytes(path_, file_bytes("{\"a\":{\"dtype\":\"" + name + "\",\"shape\":[3]," +
                                      "\"data_offsets\":[0," + std::to_string(3 * bytes) + "]}}",
                                  static_cast<size_t>(3 * bytes)));
    EXPECT_EQ(SafetensorsFile(path_).find("a")->spec.bytes(), 3u * static_cast<unsigned>(bytes));
  }
}

TEST_F(SafetensorsFileTest, ConvertsEveryFloatType) {
  SafetensorsWriter writer(path_, {{"f32", {2}, "F32"}, {"bf16", {4}, "BF16"}, {"f16", {5}, "F16"}},
                           {});
  writer.write(0, 0, bytes_of(std::array{1.25f, -3e38f}));
  writer.write(1, 0, bytes_of(std::array<uint16_t, 4>{0x3f80, 0xc040, 0x0000, 0x7f80}));
  writer.write(2, 0, bytes_of(std::array<uint16_t, 5>{0x3c00, 0xc200, 0x0001, 0x7bff, 0xfc00}));
  writer.finish();
  const SafetensorsFile file(path_);
  std::array<float, 2> f32{};
  std::array<float, 3> bf16{};
  std::array<float, 5> f16{};
  file.read_floats(*file.find("f32"), 0, f32);
  file.read_floats(*file.find("bf16"), 1, bf16);
  file.read_floats(*file.find("f16"), 0, f16);
  EXPECT_EQ(f32, (std::array{1.25f, -3e38f}));
  EXPECT_EQ(bf16, (std::array{-3.0f, 0.0f, HUGE_VALF}));
  EXPECT_EQ(f16, (std::array{1.0f, -3.0f, 0x1p-24f, 65504.0f, -HUGE_VALF}));
}

// Longer than the conversion's block, and of a length that no power of two divides.
TEST_F(SafetensorsFileTest, ConvertsLongTensorsInPlace) {
  constexpr size_t kCount = 10007;
  std::vector<uint16_t> stored(kCount);
  std::iota(stored.begin(), stored.end(), uint16_t{0x3f80});
  SafetensorsWriter writer(path_, {{"a", {kCount}, "BF16"}}, {});
  writer.write(0, 0, std::as_bytes(std::span(stored)));
  writer.finish();
  const SafetensorsFile file(path_);
  std::vector<float> out(kCount);
  file.read_floats(file.entries()[0], 0, out);
  for (size_t i = 0; i < kCount; ++i) ASSERT_EQ(out[i], bf16_to_float(stored[i])) << i;
}

TEST_F(SafetensorsFileTest, RefusesToConvertIntegers) {
  write_bytes(path_, file_bytes(kTwoTensors, 11));
  const SafetensorsFile file(path_);
  std::array<float, 3> out{};
  const std::string message =
      refusal(ErrorCode::invalid_file, [&] { file.read_floats(*file.find("b"), 0, out); });
  EXPECT_TRUE(contains(message, "tensor \"b\" has dtype U8, expected F32, BF16 or F16"));
}

TEST_F(SafetensorsFileTest, DiesWhenReadingOutsideATensor) {
  write_bytes(path_, file_bytes(kTwoTensors, 11));
  const SafetensorsFile file(path_);
  std::array<std::byte, 2> out{};
  EXPECT_DEATH(file.read_raw(*file.find("b"), 2, out), "CHECK");
  EXPECT_DEATH(file.read_raw(*file.find("a"), 0, out), "CHECK");
}

TEST_F(SafetensorsFileTest, ReportsMissingFile) {
  const std::string message = refusal(ErrorCode::not_found, [&] { SafetensorsFile file(path_); });
  EXPECT_TRUE(contains(message, path_.string()));
}

TEST_F(SafetensorsFileTest, RefusesFilesWithoutAHeader) {
  EXPECT_TRUE(contains(refusal_of(""), "0 bytes long, expected at least the 8 bytes"));
  EXPECT_TRUE(contains(refusal_of("1234567"), "7 bytes long"));
  EXPECT_TRUE(contains(refusal_of(std::string(64, '\0')), "header (0 bytes) does not begin with"));
  EXPECT_TRUE(contains(refusal_of_header(" {}", 0), "(3 bytes) does not begin with '{'"));
  EXPECT_TRUE(contains(refusal_of("version https://git-lfs.github.com/spec/v1\n"), "git lfs pull"));
}

TEST_F(SafetensorsFileTest, RefusesImpossibleHeaderLengths) {
  EXPECT_TRUE(contains(refusal_of(std::string("\x01\xe1\xf5\x05\0\0\0\0{}", 10)),
                       "header length is 100000001, expected at most 100000000"));
  EXPECT_TRUE(
      contains(refusal_of(std::string(8, '\xff')), "header length is 18446744073709551615"));
  EXPECT_TRUE(contains(refusal_of(file_bytes("{}", 0).substr(0, 9)),
                       "truncated: header length is 2, but only 1 bytes follow it, so 1 bytes are "
                       "missing; download it again"));
}

TEST_F(SafetensorsFileTest, RefusesBrokenJson) {
  EXPECT_TRUE(contains(refusal_of_header("{\"a\":", 0), "invalid JSON: "));
  EXPECT_TRUE(contains(refusal_of_header("{} x", 0), "invalid JSON: "));
  EXPECT_TRUE(contains(refusal_of_header("{\"\xff\":1}", 0), "invalid JSON: "));
  EXPECT_TRUE(contains(refusal_of_header(std::string("{}\0}", 4), 0), "NUL byte"));
  EXPECT_TRUE(contains(refusal_of_header("{\"a\":" + std::string(100000, '['), 0), "deeper than"));
}

TEST_F(SafetensorsFileTest, RefusesDuplicateKeys) {
  const std::string one = R"("a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]})";
  EXPECT_TRUE(contains(refusal_of_header("{" + one + "," + one + "}", 1), "\"a\" appears twice"));
  EXPECT_TRUE(contains(refusal_of_tensor(R"("dtype":"U8","shape":[1],"shape":[1],)"
                                         R"("data_offsets":[0,1])",
                                         1),
                       "\"shape\" appears twice"));
  EXPECT_TRUE(contains(refusal_of_header(R"({"__metadata__":{"k":"1","k":"1"}})", 0),
                       "\"k\" appears twice"));
}

TEST_F(SafetensorsFileTest, RefusesMetadataThatIsNotStrings) {
  EXPECT_TRUE(contains(refusal_of_header(R"({"__metadata__":{"step":3}})", 0),
                       "__metadata__ \"step\" is a JSON number, expected a string"));
  EXPECT_TRUE(contains(refusal_of_header(R"({"__metadata__":[]})", 0),
                       "__metadata__ is a JSON array, expected an object"));
}

TEST_F(SafetensorsFileTest, RefusesUnknownTypes) {
  EXPECT_TRUE(contains(refusal_of_tensor(R"("dtype":"F12","shape":[1],"data_offsets":[0,1])", 1),
                       "tensor \"a\": dtype is \"F12\", expected one of BOOL, U8, "));
  EXPECT_TRUE(contains(refusal_of_tensor(R"("dtype":7,"shape":[1],"data_offsets":[0,1])", 1),
                       "dtype is 7, expected one of"));
  EXPECT_TRUE(contains(refusal_of_tensor(R"("shape":[1],"data_offsets":[0,1])", 1),
                       "dtype is missing, expected one of"));
  EXPECT_TRUE(contains(refusal_of_header(R"({"a":3})", 0), "tensor \"a\": a JSON number"));
}

TEST_F(SafetensorsFileTest, RefusesShapesThatAreNotWholeNumbers) {
  for (const std::string shape :
       {"[-1]", "[1.0]", "[\"1\"]", "[[]]", "3", "[1e2]", "[18446744073709551616]", "[null]"}) {
    const std::string message =
        refusal_of_tensor("\"dtype\":\"U8\",\"shape\":" + shape + ",\"data_offsets\":[0,1]", 1);
    EXPECT_TRUE(contains(message, "tensor \"a\": shape is "));
    EXPECT_TRUE(contains(message, "expected an array of whole numbers"));
  }
  EXPECT_TRUE(contains(refusal_of_tensor(R"("dtype":"U8","data_offsets":[0,1])", 1),
                       "shape is missing, expected an array"));
}

TEST_F(SafetensorsFileTest, RefusesShapesThatOverflow) {
  const std::string rest = R"(],"data_offsets":[0,0])";
  EXPECT_TRUE(
      contains(refusal_of_tensor(R"("dtype":"U8","shape":[4294967296,4294967296)" + rest, 0),
               "shape [4294967296,4294967296] needs more than 2^64 bytes"));
  EXPECT_TRUE(contains(refusal_of_tensor(R"("dtype":"F32","shape":[4611686018427387904)" + rest, 0),
                       "needs more than 2^64 bytes"));
}

TEST_F(SafetensorsFileTest, RefusesOffsetsThatDoNotMatchTheShape) {
  for (const std::string offsets : {"[0,7]", "[0,9]", "[8,0]", "[0]", "[0,4,8]", "[]"}) {
    EXPECT_TRUE(contains(
        refusal_of_tensor("\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":" + offsets, 8),
        "tensor \"a\": data_offsets are " + offsets +
            ", expected a begin and an end 8 bytes apart for F32 [2]"));
  }
  EXPECT_TRUE(
      contains(refusal_of_tensor(R"("dtype":"F32","shape":[2])", 8), "data_offsets is missing"));
}

TEST_F(SafetensorsFileTest, RefusesHolesAndOverlaps) {
  const auto two = [](const std::string& second) {
    return R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
           R"("b":{"dtype":"U8","shape":[4],"data_offsets":)" +
           second + "}}";
  };
  EXPECT_TRUE(contains(refusal_of_header(two("[5,9]"), 9),
                       "tensor \"b\" begins at byte 5 of the contents, expected 4: there is a hole "
                       "before it"));
  EXPECT_TRUE(contains(refusal_of_header(two("[3,7]"), 7),
                       "tensor \"b\" begins at byte 3 of the contents, expected 4: it overlaps"));
  EXPECT_TRUE(contains(refusal_of_header(two("[0,4]"), 4), "it overlaps"));
  EXPECT_TRUE(contains(refusal_of_tensor(R"("dtype":"U8","shape":[4],"data_offsets":[1,5])", 5),
                       "tensor \"a\" begins at byte 1 of the contents, expected 0"));
}

TEST_F(SafetensorsFileTest, SaysHowManyBytesATruncatedFileLacks) {
  EXPECT_TRUE(contains(refusal_of_header(kTwoTensors, 6),
                       "truncated: its tensors need 11 bytes and 6 are there, so 5 bytes are "
                       "missing; download it again"));
  EXPECT_TRUE(contains(refusal_of_header(kTwoTensors, 13), "2 bytes follow the last tensor"));
}

}  // namespace
}  // namespace overspill
