// AsyncIo over Linux's older asynchronous interface, for hosts that deny io_uring. It is
// asynchronous for O_DIRECT files only; others block in submit. One thread at a time.
#include <libaio.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <numeric>
#include <span>
#include <thread>
#include <vector>

#include "engine/base/error.h"
#include "nvme/io_backends.h"

namespace overspill {
namespace {

using std::chrono::milliseconds;

constexpr int kSubmitTries = 1000;  // of a millisecond each, while the kernel is out of memory

class LibaioIo final : public AsyncIo {
 public:
  LibaioIo(io_context_t context, uint32_t depth, std::span<const int> files);
  ~LibaioIo() override;
  LibaioIo(const LibaioIo&) = delete;
  LibaioIo& operator=(const LibaioIo&) = delete;

  const char* name() const override { return "libaio"; }
  uint32_t depth() const override { return static_cast<uint32_t>(blocks_.size()); }
  void submit(std::span<const IoRequest> requests) override;
  size_t reap(std::span<IoResult> results, milliseconds timeout) override;
  void cancel() override;

 private:
  void prepare(const IoRequest& request);
  void reject(iocb* block, int error);
  void release(iocb* block);

  io_context_t context_;
  std::vector<int> files_;
  std::vector<iocb> blocks_;     // one per request in flight
  std::vector<uint64_t> tags_;   // of each block
  std::vector<bool> in_kernel_;  // whether a block is
  std::vector<uint32_t> free_;   // indices of blocks
  std::vector<iocb*> batch_;
  std::vector<io_event> events_;
  std::vector<IoResult> rejected_;  // requests the kernel never took
  uint32_t in_flight_ = 0;          // handed to the kernel, not reaped
};

LibaioIo::LibaioIo(io_context_t context, uint32_t depth, std::span<const int> files)
    : context_(context),
      files_(files.begin(), files.end()),
      blocks_(depth),
      tags_(depth),
      in_kernel_(depth),
      free_(depth),
      events_(depth) {
  std::iota(free_.rbegin(), free_.rend(), 0u);
  batch_.reserve(depth);
  rejected_.reserve(depth);
}

LibaioIo::~LibaioIo() {
  std::vector<IoResult> ignored(depth());
  while (in_flight_ > 0) reap(ignored, kForever);  // the kernel may still write to the buffers
  io_destroy(context_);
}

void LibaioIo::prepare(const IoRequest& request) {
  CHECK(request.file < files_.size());
  const uint32_t index = free_.back();
  free_.pop_back();
  iocb* const block = &blocks_[index];
  const auto offset = static_cast<long long>(request.offset);
  if (request.write) {
    io_prep_pwrite(block, files_[request.file], request.memory, request.bytes, offset);
  } else {
    io_prep_pread(block, files_[request.file], request.memory, request.bytes, offset);
  }
  tags_[index] = request.tag;
  batch_.push_back(block);
}

void LibaioIo::release(iocb* block) {
  const auto index = static_cast<uint32_t>(block - blocks_.data());
  in_kernel_[index] = false;
  free_.push_back(index);
}

void LibaioIo::reject(iocb* block, int error) {
  rejected_.push_back(
      {.tag = tags_[static_cast<size_t>(block - blocks_.data())], .bytes = 0, .error = error});
  release(block);
}

void LibaioIo::submit(std::span<const IoRequest> requests) {
  CHECK(requests.size() <= free_.size() &&
        in_flight_ + rejected_.size() + requests.size() <= depth());
  batch_.clear();
  for (const IoRequest& request : requests) prepare(request);
  int tries = 0;
  for (size_t done = 0; done < batch_.size();) {
    const auto left = static_cast<long>(batch_.size() - done);
    const int outcome = io_submit(context_, left, batch_.data() + done);
    if (outcome > 0) {
      const auto taken = static_cast<size_t>(outcome);
      for (size_t i = done; i < done + taken; ++i) {
        in_kernel_[static_cast<size_t>(batch_[i] - blocks_.data())] = true;
      }
      in_flight_ += static_cast<uint32_t>(taken);
      done += taken;
    } else if ((outcome == 0 || outcome == -EAGAIN || outcome == -EINTR) &&
               ++tries < kSubmitTries) {
      std::this_thread::sleep_for(milliseconds(1));
    } else {  // it is about the first block that is left
      reject(batch_[done++], outcome == 0 ? EAGAIN : -outcome);
    }
  }
}

size_t LibaioIo::reap(std::span<IoResult> results, milliseconds timeout) {
  CHECK(!results.empty());
  if (!rejected_.empty()) {
    const size_t count = std::min(results.size(), rejected_.size());
    std::copy_n(rejected_.begin(), count, results.begin());
    rejected_.erase(rejected_.begin(), rejected_.begin() + static_cast<ptrdiff_t>(count));
    return count;
  }
  if (in_flight_ == 0) return 0;
  const auto most = static_cast<long>(std::min(results.size(), events_.size()));
  timespec limit{.tv_sec = timeout.count() / 1000, .tv_nsec = timeout.count() % 1000 * 1000'000};
  int count;
  do {
    count = io_getevents(context_, 1, most, events_.data(), timeout == kForever ? nullptr : &limit);
  } while (count == -EINTR);
  CHECK(count >= 0);  // anything else would mean giving up while the kernel owns buffers
  for (int i = 0; i < count; ++i) {
    const io_event& event = events_[static_cast<size_t>(i)];
    const auto moved = static_cast<long>(event.res);
    results[static_cast<size_t>(i)] = {
        .tag = tags_[static_cast<size_t>(event.obj - blocks_.data())],
        .bytes = moved < 0 ? 0 : static_cast<uint32_t>(moved),
        .error = moved < 0 ? static_cast<int>(-moved) : 0};
    release(event.obj);
  }
  in_flight_ -= static_cast<uint32_t>(count);
  return static_cast<size_t>(count);
}

void LibaioIo::cancel() {
  for (size_t i = 0; i < blocks_.size(); ++i) {
    io_event event{};
    // What can be cancelled completes through the queue like everything else.
    if (in_kernel_[i]) io_cancel(context_, &blocks_[i], &event);
  }
}

}  // namespace

io_backend::Attempt io_backend::make_libaio_io(uint32_t depth, std::span<const int> files) {
  io_context_t context{};
  const int outcome = io_setup(static_cast<int>(depth), &context);
  if (outcome < 0) return {.io = nullptr, .step = "io_setup", .error = -outcome};
  auto io = std::make_unique<LibaioIo>(context, depth, files);
  const ProbePage page = make_probe_page();
  if (const ProbeFailure failure = probe_io(*io, files, page.get()); failure.error != 0) {
    return {.io = nullptr, .step = failure.step, .error = failure.error};
  }
  return {.io = std::move(io)};
}

}  // namespace overspill
