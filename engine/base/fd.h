// File descriptors that close themselves, whole reads and writes, and durable renames.
// Every failure is an Error(io) naming the file, the place and the cause.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <utility>

namespace overspill {

/// A move-only file descriptor with the path it was opened by.
class Fd {
 public:
  Fd() = default;
  Fd(int fd, std::filesystem::path path) : fd_(fd), path_(std::move(path)) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)), path_(std::move(other.path_)) {}
  Fd& operator=(Fd&& other) noexcept;
  ~Fd() { reset(); }

  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  const std::filesystem::path& path() const { return path_; }
  void reset();

 private:
  int fd_ = -1;
  std::filesystem::path path_;
};

/// open(2) with O_CLOEXEC; Error(not_found) when the path does not exist, else Error(io).
Fd open_file(const std::filesystem::path& path, int flags, int mode = 0644);
uint64_t file_size(const Fd& file);

/// Reads exactly the span; a short file is an Error(invalid_file).
void read_exact(const Fd& file, uint64_t offset, std::span<std::byte> out);
void write_exact(const Fd& file, uint64_t offset, std::span<const std::byte> bytes);

std::string read_text_file(const std::filesystem::path& path);
/// Writes, fsyncs and closes a new file (or truncates an old one).
void write_text_file(const std::filesystem::path& path, const std::string& text);

void sync_file(const Fd& file);
/// fsync of a directory, so that a rename in it survives a crash.
void sync_directory(const std::filesystem::path& directory);
/// Renames `from` over `to` and syncs the parent directory.
void rename_durably(const std::filesystem::path& from, const std::filesystem::path& to);

}  // namespace overspill
