// AsyncIo over a few threads that call pread and pwrite, for hosts that deny io_uring. Queue and
// results are bounded by the depth and allocated once. One caller; the workers share one mutex.
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <span>
#include <system_error>
#include <thread>
#include <vector>

#include "engine/base/error.h"
#include "nvme/io_backends.h"

namespace overspill {
namespace {

constexpr uint32_t kMaxThreads = 8;

class ThreadPoolIo final : public AsyncIo {
 public:
  ThreadPoolIo(uint32_t depth, std::span<const int> files);
  ~ThreadPoolIo() override { stop(); }
  ThreadPoolIo(const ThreadPoolIo&) = delete;
  ThreadPoolIo& operator=(const ThreadPoolIo&) = delete;

  const char* name() const override { return "threads"; }
  uint32_t depth() const override { return depth_; }
  void submit(std::span<const IoRequest> requests) override;
  size_t reap(std::span<IoResult> results, std::chrono::milliseconds timeout) override;
  /// Drops what no thread has begun; a system call that has begun cannot be stopped.
  void cancel() override;

 private:
  void work();
  IoResult perform(const IoRequest& request) const;
  /// Lets the workers finish all that is queued, then joins them.
  void stop();

  const uint32_t depth_;
  const std::vector<int> files_;
  uint32_t in_flight_ = 0;  // submitted, not reaped; the caller's thread only

  std::mutex mutex_;  // guards all below
  std::condition_variable queued_, finished_;
  std::vector<IoRequest> queue_;  // ring of depth_ entries
  size_t queue_head_ = 0, queue_size_ = 0;
  std::vector<IoResult> results_;
  bool stopping_ = false;
  std::vector<std::thread> workers_;
};

ThreadPoolIo::ThreadPoolIo(uint32_t depth, std::span<const int> files)
    : depth_(depth), files_(files.begin(), files.end()), queue_(depth) {
  results_.reserve(depth);
  const uint32_t threads = std::min(depth, kMaxThreads);
  workers_.reserve(threads);
  try {
    for (uint32_t i = 0; i < threads; ++i) workers_.emplace_back([this] { work(); });
  } catch (const std::system_error& error) {
    stop();
    fail(ErrorCode::io, "start {} I/O threads: {}; raise the limit of processes (ulimit -u)",
         threads, errno_text(error.code().value()));
  }
}

void ThreadPoolIo::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  queued_.notify_all();
  for (std::thread& worker : workers_) worker.join();
  workers_.clear();
}

void ThreadPoolIo::submit(std::span<const IoRequest> requests) {
  CHECK(in_flight_ + requests.size() <= depth_);
  for (const IoRequest& request : requests) CHECK(request.file < files_.size());
  {
    const std::lock_guard lock(mutex_);
    for (const IoRequest& request : requests) {
      queue_[(queue_head_ + queue_size_) % depth_] = request;
      ++queue_size_;
    }
  }
  in_flight_ += static_cast<uint32_t>(requests.size());
  if (requests.size() == 1)
    queued_.notify_one();
  else
    queued_.notify_all();
}

size_t ThreadPoolIo::reap(std::span<IoResult> results, std::chrono::milliseconds timeout) {
  CHECK(!results.empty());
  if (in_flight_ == 0) return 0;
  std::unique_lock lock(mutex_);
  const auto finished = [this] { return !results_.empty(); };
  if (timeout == kForever) {
    finished_.wait(lock, finished);
  } else if (!finished_.wait_until(lock, std::chrono::steady_clock::now() + timeout, finished)) {
    return 0;
  }
  const size_t count = std::min(results.size(), results_.size());
  std::copy_n(results_.end() - static_cast<ptrdiff_t>(count), count, results.begin());
  results_.resize(results_.size() - count);
  in_flight_ -= static_cast<uint32_t>(count);
  return count;
}

void ThreadPoolIo::cancel() {
  const std::lock_guard lock(mutex_);
  for (; queue_size_ > 0; --queue_size_) {
    results_.push_back({.tag = queue_[queue_head_].tag, .bytes = 0, .error = ECANCELED});
    queue_head_ = (queue_head_ + 1) % depth_;
  }
}

IoResult ThreadPoolIo::perform(const IoRequest& request) const {
  const int fd = files_[request.file];
  const auto offset = static_cast<off_t>(request.offset);
  ssize_t moved;
  do {
    moved = request.write ? pwrite(fd, request.memory, request.bytes, offset)
                          : pread(fd, request.memory, request.bytes, offset);
  } while (moved < 0 && errno == EINTR);
  if (moved < 0) return {.tag = request.tag, .bytes = 0, .error = errno};
  return {.tag = request.tag, .bytes = static_cast<uint32_t>(moved), .error = 0};
}

void ThreadPoolIo::work() {
  pthread_setname_np(pthread_self(), "overspill-io");
  std::unique_lock lock(mutex_);
  for (;;) {
    queued_.wait(lock, [this] { return queue_size_ > 0 || stopping_; });
    if (queue_size_ == 0) return;
    const IoRequest request = queue_[queue_head_];
    queue_head_ = (queue_head_ + 1) % depth_;
    --queue_size_;
    lock.unlock();
    const IoResult result = perform(request);
    lock.lock();
    results_.push_back(result);
    finished_.notify_one();
  }
}

}  // namespace

std::unique_ptr<AsyncIo> io_backend::make_thread_pool_io(uint32_t depth,
                                                         std::span<const int> files) {
  return std::make_unique<ThreadPoolIo>(depth, files);
}

}  // namespace overspill
