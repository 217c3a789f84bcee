// Files that close themselves, whole transfers, and durable renames.
#include "engine/base/fd.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <vector>

#include "engine/base/error.h"

namespace overspill {
namespace {

class FdTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (std::filesystem::temp_directory_path() / "overspill-fd-XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    directory_ = pattern;
  }
  void TearDown() override { std::filesystem::remove_all(directory_); }

  std::filesystem::path directory_;
};

bool is_open(int fd) { return ::fcntl(fd, F_GETFD) >= 0; }

template <class Action>
Error error_of(const Action& action) {
  try {
    action();
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "nothing was thrown";
  return Error(ErrorCode::internal, "");
}

TEST_F(FdTest, ClosesOnceWhenMovedAndReset) {
  Fd first = open_file(directory_, O_RDONLY | O_DIRECTORY);
  const int raw = first.get();
  EXPECT_EQ(::fcntl(raw, F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
  Fd second = std::move(first);
  EXPECT_FALSE(first.valid());
  EXPECT_EQ(second.get(), raw);
  EXPECT_EQ(second.path(), directory_);
  Fd third = open_file(directory_, O_RDONLY | O_DIRECTORY);
  const int replaced = third.get();
  third = std::move(second);
  EXPECT_FALSE(is_open(replaced));
  EXPECT_TRUE(is_open(raw));
  third.reset();
  EXPECT_FALSE(is_open(raw));
}

TEST_F(FdTest, OpenNamesMissingPath) {
  const Error error = error_of([&] { open_file(directory_ / "absent", O_RDONLY); });
  EXPECT_EQ(error.code(), ErrorCode::not_found);
  EXPECT_NE(std::string(error.what()).find((directory_ / "absent").string()), std::string::npos);
}

TEST_F(FdTest, OpenOfFileAsDirectoryIsIoError) {
  write_text_file(directory_ / "file", "x");
  const Error error = error_of([&] { open_file(directory_ / "file", O_RDONLY | O_DIRECTORY); });
  EXPECT_EQ(error.code(), ErrorCode::io);
  EXPECT_NE(std::string(error.what()).find(errno_text(ENOTDIR)), std::string::npos);
}

TEST_F(FdTest, WritesAndReadsAtOffsets) {
  const Fd file = open_file(directory_ / "file", O_RDWR | O_CREAT);
  const std::vector<std::byte> bytes = {std::byte{1}, std::byte{2}, std::byte{3}};
  write_exact(file, 5, bytes);
  EXPECT_EQ(file_size(file), 8u);
  std::vector<std::byte> back(3);
  read_exact(file, 5, back);
  EXPECT_EQ(back, bytes);
}

TEST_F(FdTest, ShortFileIsInvalidFileWithPlace) {
  write_text_file(directory_ / "file", "12345");
  const Fd file = open_file(directory_ / "file", O_RDONLY);
  std::vector<std::byte> out(10);
  const Error error = error_of([&] { read_exact(file, 2, out); });
  EXPECT_EQ(error.code(), ErrorCode::invalid_file);
  const std::string message = error.what();
  EXPECT_NE(message.find("ends at byte 5"), std::string::npos) << message;
  EXPECT_NE(message.find("10 bytes at offset 2"), std::string::npos) << message;
}

TEST_F(FdTest, WriteToFullDeviceIsIoError) {
  if (!std::filesystem::exists("/dev/full")) GTEST_SKIP() << "no /dev/full here";
  const Fd file = open_file("/dev/full", O_WRONLY);
  const Error error = error_of([&] { write_exact(file, 0, std::vector<std::byte>(16)); });
  EXPECT_EQ(error.code(), ErrorCode::io);
  const std::string message = error.what();
  EXPECT_NE(message.find("write /dev/full: 16 bytes at offset 0"), std::string::npos) << message;
  EXPECT_NE(message.find(errno_text(ENOSPC)), std::string::npos) << message;
}

TEST_F(FdTest, TextFilesRoundTripAndTruncate) {
  const std::filesystem::path path = directory_ / "text";
  std::string text(100'000, 'a');
  text[70'000] = '\0';
  write_text_file(path, text);
  EXPECT_EQ(read_text_file(path), text);
  write_text_file(path, "short");
  EXPECT_EQ(read_text_file(path), "short");
}

TEST_F(FdTest, ReadsProcFilesWithoutSize) {
  EXPECT_NE(read_text_file("/proc/self/status").find("Name:"), std::string::npos);
}

TEST_F(FdTest, ReadingDirectoryAsTextIsIoError) {
  EXPECT_EQ(error_of([&] { read_text_file(directory_); }).code(), ErrorCode::io);
}

TEST_F(FdTest, RenameReplacesAndRefusesMissing) {
  write_text_file(directory_ / "new", "new");
  write_text_file(directory_ / "old", "old");
  rename_durably(directory_ / "new", directory_ / "old");
  EXPECT_EQ(read_text_file(directory_ / "old"), "new");
  EXPECT_FALSE(std::filesystem::exists(directory_ / "new"));
  const Error error = error_of([&] { rename_durably(directory_ / "absent", directory_ / "old"); });
  EXPECT_EQ(error.code(), ErrorCode::not_found);
  EXPECT_NE(std::string(error.what()).find("absent"), std::string::npos);
}

}  // namespace
}  // namespace overspill
