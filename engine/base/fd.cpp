// Plain blocking file operations with full error texts. Thread-safe: no state besides the Fd.
// Does not do O_DIRECT alignment or asynchronous I/O: see nvme/.
#include "engine/base/fd.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "engine/base/error.h"

namespace overspill {
namespace {

// Linux moves at most 2 GiB - 4 KiB per call; ask for a round size below it.
constexpr size_t kMaxTransferBytes = size_t{1} << 30;

[[noreturn]] void fail_io(const char* action, const std::filesystem::path& path, int error) {
  const ErrorCode code = error == ENOENT ? ErrorCode::not_found : ErrorCode::io;
  fail(code, "{} {}: {}", action, path.string(), errno_text(error));
}

std::filesystem::path parent_of(const std::filesystem::path& path) {
  const std::filesystem::path parent = path.parent_path();
  return parent.empty() ? std::filesystem::path(".") : parent;
}

}  // namespace

Fd& Fd::operator=(Fd&& other) noexcept {
  if (this == &other) return *this;
  reset();
  fd_ = std::exchange(other.fd_, -1);
  path_ = std::move(other.path_);
  return *this;
}

void Fd::reset() {
  // close's result is useless here: whoever needs durability calls sync_file first.
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

Fd open_file(const std::filesystem::path& path, int flags, int mode) {
  int fd = -1;
  do {
    fd = ::open(path.c_str(), flags | O_CLOEXEC, mode);
  } while (fd < 0 && errno == EINTR);
  if (fd < 0) fail_io("open", path, errno);
  return Fd(fd, path);
}

uint64_t file_size(const Fd& file) {
  struct stat status {};
  if (::fstat(file.get(), &status) != 0) fail_io("fstat", file.path(), errno);
  return static_cast<uint64_t>(status.st_size);
}

void read_exact(const Fd& file, uint64_t offset, std::span<std::byte> out) {
  size_t done = 0;
  while (done < out.size()) {
    const size_t ask = std::min(out.size() - done, kMaxTransferBytes);
    const ssize_t got =
        ::pread(file.get(), out.data() + done, ask, static_cast<off_t>(offset + done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      fail(ErrorCode::io, "read {}: {} bytes at offset {}: {}", file.path().string(), ask,
           offset + done, errno_text(errno));
    }
    if (got == 0) {
      fail(ErrorCode::invalid_file,
           "read {}: the file ends at byte {}, but {} bytes at offset {} were expected; it is "
           "truncated, so copy or create it again",
           file.path().string(), offset + done, out.size(), offset);
    }
    done += static_cast<size_t>(got);
  }
}

void write_exact(const Fd& file, uint64_t offset, std::span<const std::byte> bytes) {
  size_t done = 0;
  while (done < bytes.size()) {
    const size_t ask = std::min(bytes.size() - done, kMaxTransferBytes);
    const ssize_t put =
        ::pwrite(file.get(), bytes.data() + done, ask, static_cast<off_t>(offset + done));
    if (put < 0 && errno == EINTR) continue;
    if (put <= 0) {
      fail(ErrorCode::io, "write {}: {} bytes at offset {}: {}", file.path().string(), ask,
           offset + done, put < 0 ? errno_text(errno) : "nothing was written");
    }
    done += static_cast<size_t>(put);
  }
}

std::string read_text_file(const std::filesystem::path& path) {
  const Fd file = open_file(path, O_RDONLY);
  std::string text;
  char block[16384];
  // Read to the end rather than to st_size, which is 0 for files in /proc and /sys.
  for (;;) {
    const ssize_t got = ::read(file.get(), block, sizeof(block));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail_io("read", path, errno);
    if (got == 0) return text;
    text.append(block, static_cast<size_t>(got));
  }
}

void write_text_file(const std::filesystem::path& path, const std::string& text) {
  const Fd file = open_file(path, O_WRONLY | O_CREAT | O_TRUNC);
  write_exact(file, 0, std::as_bytes(std::span(text)));
  sync_file(file);
}

void sync_file(const Fd& file) {
  if (::fsync(file.get()) != 0) fail_io("fsync", file.path(), errno);
}

void sync_directory(const std::filesystem::path& directory) {
  sync_file(open_file(directory, O_RDONLY | O_DIRECTORY));
}

void rename_durably(const std::filesystem::path& from, const std::filesystem::path& to) {
  if (::rename(from.c_str(), to.c_str()) != 0) {
    const int error = errno;
    fail(error == ENOENT ? ErrorCode::not_found : ErrorCode::io, "rename {} to {}: {}",
         from.string(), to.string(), errno_text(error));
  }
  sync_directory(parent_of(to));
}

}  // namespace overspill
