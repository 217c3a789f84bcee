// What the tests of safetensors files share: a temporary directory, files made by hand, and the
// message of a refusal.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <span>
#include <string>

#include "engine/base/error.h"
#include "engine/model/safetensors.h"

namespace overspill::test {

namespace fs = std::filesystem;
using Strings = std::map<std::string, std::string>;

inline testing::AssertionResult contains(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "\"" << text << "\" lacks \"" << part << "\"";
}

inline std::string refusal(ErrorCode code, const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    EXPECT_STREQ(error_code_name(error.code()), error_code_name(code)) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "nothing was refused";
  return "";
}

inline void write_bytes(const fs::path& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

inline std::string read_bytes(const fs::path& path) {
  std::ifstream stream(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

/// Header length, header and `contents_bytes` bytes that count up.
inline std::string file_bytes(const std::string& header, size_t contents_bytes) {
  const uint64_t length = header.size();
  std::string bytes(sizeof(length), '\0');
  std::memcpy(bytes.data(), &length, sizeof(length));
  bytes += header;
  for (size_t i = 0; i < contents_bytes; ++i) bytes += static_cast<char>(i);
  return bytes;
}

template <class T, size_t N>
std::span<const std::byte> bytes_of(const std::array<T, N>& values) {
  return std::as_bytes(std::span(values));
}

inline fs::path test_data() {
  const char* given = std::getenv("OVERSPILL_TEST_DATA");
  return given != nullptr ? given : OVERSPILL_SOURCE_DIR "/../shared/data";
}

/// A directory that is removed at the end of its test.
class TemporaryDirectory : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "overspill_tensors_XXXXXX").string();
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    directory_ = name;
    path_ = directory_ / "model.safetensors";
  }
  void TearDown() override { fs::remove_all(directory_); }

  /// The message with which a file of these bytes is refused; it must name the file.
  std::string refusal_of(const std::string& bytes) const {
    write_bytes(path_, bytes);
    const std::string message =
        refusal(ErrorCode::invalid_file, [&] { SafetensorsFile file(path_); });
    EXPECT_TRUE(contains(message, path_.string()));
    return message;
  }
  std::string refusal_of_header(const std::string& header, size_t contents_bytes) const {
    return refusal_of(file_bytes(header, contents_bytes));
  }
  /// A file with one tensor "a" of these fields.
  std::string refusal_of_tensor(const std::string& fields, size_t contents_bytes) const {
    return refusal_of_header("{\"a\":{" + fields + "}}", contents_bytes);
  }

  fs::path directory_, path_;
};

inline constexpr const char* kTwoTensors =
    R"({"__metadata__":{"format":"pt"},"b":{"dtype":"U8","shape":[3],"data_offsets":[8,11]},)"
    R"("a":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]}}  )";

}  // namespace overspill::test
