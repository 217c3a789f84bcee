// AsyncIo over memory, for tests: no drive, and under ThreadSanitizer a lane that touches a buffer
// in flight is seen, which the kernel's accesses never are. Transfers happen when they are reaped.
// One thread per instance; instances share their files under a mutex.
#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

#include "engine/base/error.h"
#include "nvme/io_backends.h"

namespace overspill {

/// Contents by device and inode of the file that a descriptor names.
class MemoryFiles {
 public:
  using Key = std::pair<uint64_t, uint64_t>;

  uint32_t read(const Key& key, uint64_t offset, std::span<std::byte> out) {
    const std::lock_guard lock(mutex_);
    const std::vector<std::byte>& bytes = files_[key];
    if (offset >= bytes.size()) return 0;
    const size_t count = std::min<uint64_t>(out.size(), bytes.size() - offset);
    std::memcpy(out.data(), bytes.data() + offset, count);
    return static_cast<uint32_t>(count);
  }
  void write(const Key& key, uint64_t offset, std::span<const std::byte> in) {
    const std::lock_guard lock(mutex_);
    std::vector<std::byte>& bytes = files_[key];
    bytes.resize(std::max<uint64_t>(bytes.size(), offset + in.size()));
    std::memcpy(bytes.data() + offset, in.data(), in.size());
  }

 private:
  std::mutex mutex_;
  std::map<Key, std::vector<std::byte>> files_;
};

std::shared_ptr<MemoryFiles> make_memory_files() { return std::make_shared<MemoryFiles>(); }

namespace {

class MemoryIo final : public AsyncIo {
 public:
  MemoryIo(uint32_t depth, std::span<const int> files, std::shared_ptr<MemoryFiles> contents)
      : depth_(depth), contents_(std::move(contents)) {
    for (const int fd : files) files_.push_back(look_up(fd));
    queue_.reserve(depth);
  }
  ~MemoryIo() override {
    for (const IoRequest& request : queue_) perform(request);
  }

  const char* name() const override { return "memory"; }
  uint32_t depth() const override { return depth_; }
  void submit(std::span<const IoRequest> requests) override {
    CHECK(queue_.size() + requests.size() <= depth_);
    for (const IoRequest& request : requests) CHECK(request.file < files_.size());
    queue_.insert(queue_.end(), requests.begin(), requests.end());
  }
  size_t reap(std::span<IoResult> results, std::chrono::milliseconds) override {
    CHECK(!results.empty());
    const size_t count = std::min(results.size(), queue_.size());
    for (size_t i = 0; i < count; ++i) results[i] = perform(queue_[i]);
    queue_.erase(queue_.begin(), queue_.begin() + static_cast<ptrdiff_t>(count));
    return count;
  }
  void cancel() override {}  // all that is queued completes at the next reap

 private:
  struct File {
    MemoryFiles::Key key{};
    bool readable = false, writable = false;
  };

  static File look_up(int fd) {
    struct stat status {};
    const int flags = fcntl(fd, F_GETFL);
    if (flags < 0 || fstat(fd, &status) != 0) return {};
    const int access = flags & O_ACCMODE;
    return {.key = {status.st_dev, status.st_ino},
            .readable = access != O_WRONLY,
            .writable = access != O_RDONLY};
  }
  IoResult perform(const IoRequest& request) {
    const File& file = files_[request.file];
    if (!(request.write ? file.writable : file.readable)) {
      return {.tag = request.tag, .bytes = 0, .error = EBADF};
    }
    const std::span<std::byte> memory(request.memory, request.bytes);
    uint32_t moved = request.bytes;
    if (request.write) {
      contents_->write(file.key, request.offset, memory);
    } else {
      moved = contents_->read(file.key, request.offset, memory);
    }
    return {.tag = request.tag, .bytes = moved, .error = 0};
  }

  const uint32_t depth_;
  std::shared_ptr<MemoryFiles> contents_;
  std::vector<File> files_;
  std::vector<IoRequest> queue_;
};

}  // namespace

std::unique_ptr<AsyncIo> io_backend::make_memory_io(uint32_t depth, std::span<const int> files,
                                                    std::shared_ptr<MemoryFiles> contents) {
  return std::make_unique<MemoryIo>(depth, files, std::move(contents));
}

}  // namespace overspill
