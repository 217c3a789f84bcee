// AsyncIo over one plain io_uring. Setup flags stop at COOP_TASKRUN: SINGLE_ISSUER would tie the
// ring to the thread that constructs and probes it, and lanes use it from another.
// One thread at a time; no SQPOLL, no IOPOLL, no registered buffers.
#include <fmt/format.h>
#include <liburing.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <memory>
#include <span>
#include <thread>
#include <vector>

#include "engine/base/error.h"
#include "nvme/async_io.h"

#ifndef IORING_SETUP_COOP_TASKRUN
#define IORING_SETUP_COOP_TASKRUN (1U << 8)  // Linux 5.19
#endif

namespace overspill {
namespace {

constexpr uint32_t kProbeBytes = 4096;
constexpr int kSubmitTries = 1000;  // of a millisecond each, while the kernel is out of memory

bool passing(int error) { return error == EAGAIN || error == EBUSY; }
void wait_a_little() { std::this_thread::sleep_for(std::chrono::milliseconds(1)); }

class UringIo final : public AsyncIo {
 public:
  /// Takes over an initialised ring.
  UringIo(const io_uring& ring, uint32_t depth, std::span<const int> files);
  ~UringIo() override;
  UringIo(const UringIo&) = delete;
  UringIo& operator=(const UringIo&) = delete;

  const char* name() const override { return "io_uring"; }
  uint32_t depth() const override { return depth_; }
  void submit(std::span<const IoRequest> requests) override;
  size_t reap(std::span<IoResult> results) override;

 private:
  void prepare(const IoRequest& request);
  /// Hands all prepared entries to the kernel; returns 0 or the errno that will not pass.
  int enter();
  size_t take_ready(std::span<IoResult> results);
  void wait_for_one();

  io_uring ring_;
  uint32_t depth_;
  std::vector<int> files_;
  bool registered_ = false;
  uint32_t in_flight_ = 0;          // handed to the kernel, not reaped
  int broken_ = 0;                  // errno after which nothing is submitted any more
  std::vector<IoResult> rejected_;  // requests the kernel never took
};

UringIo::UringIo(const io_uring& ring, uint32_t depth, std::span<const int> files)
    : ring_(ring), depth_(depth), files_(files.begin(), files.end()) {
  rejected_.reserve(depth);
  // Registered files save a lookup per request. A kernel or a limit that refuses costs just that.
  registered_ =
      !files_.empty() &&
      io_uring_register_files(&ring_, files_.data(), static_cast<unsigned>(files_.size())) == 0;
}

UringIo::~UringIo() {
  std::array<IoResult, 64> ignored;
  while (in_flight_ > 0) reap(ignored);  // the kernel may still write to the buffers
  // The kernel tears a ring down later; until then a registered, deleted file would keep its space.
  if (registered_) io_uring_unregister_files(&ring_);
  io_uring_queue_exit(&ring_);
}

void UringIo::prepare(const IoRequest& request) {
  CHECK(request.file < files_.size());
  io_uring_sqe* entry = io_uring_get_sqe(&ring_);
  CHECK(entry != nullptr);
  const int fd = registered_ ? static_cast<int>(request.file) : files_[request.file];
  if (request.write) {
    io_uring_prep_write(entry, fd, request.memory, request.bytes, request.offset);
  } else {
    io_uring_prep_read(entry, fd, request.memory, request.bytes, request.offset);
  }
  if (registered_) io_uring_sqe_set_flags(entry, IOSQE_FIXED_FILE);
  entry->user_data = request.tag;
}

int UringIo::enter() {
  int tries = 0;
  while (io_uring_sq_ready(&ring_) > 0) {
    const int submitted = io_uring_submit(&ring_);
    if (submitted >= 0 || submitted == -EINTR) continue;
    if (!passing(-submitted) || ++tries == kSubmitTries) return -submitted;
    wait_a_little();
  }
  return 0;
}

void UringIo::submit(std::span<const IoRequest> requests) {
  CHECK(in_flight_ + rejected_.size() + requests.size() <= depth_);
  size_t taken = 0;
  if (broken_ == 0) {
    for (const IoRequest& request : requests) prepare(request);
    broken_ = enter();
    // Entries left in a broken ring stay there: nothing submits them later.
    taken = requests.size() - (broken_ == 0 ? 0 : io_uring_sq_ready(&ring_));
  }
  in_flight_ += static_cast<uint32_t>(taken);
  for (const IoRequest& request : requests.subspan(taken)) {
    rejected_.push_back({.tag = request.tag, .bytes = 0, .error = broken_});
  }
}

size_t UringIo::take_ready(std::span<IoResult> results) {
  std::array<io_uring_cqe*, 64> ready;
  const size_t room = std::min(results.size(), ready.size());
  const unsigned count = io_uring_peek_batch_cqe(&ring_, ready.data(), static_cast<unsigned>(room));
  for (unsigned i = 0; i < count; ++i) {
    const int32_t outcome = ready[i]->res;
    results[i] = {.tag = ready[i]->user_data,
                  .bytes = outcome < 0 ? 0 : static_cast<uint32_t>(outcome),
                  .error = outcome < 0 ? -outcome : 0};
  }
  io_uring_cq_advance(&ring_, count);
  in_flight_ -= count;
  return count;
}

void UringIo::wait_for_one() {
  io_uring_cqe* first = nullptr;
  for (;;) {
    const int outcome = io_uring_wait_cqe(&ring_, &first);
    if (outcome == 0) return;
    if (passing(-outcome)) wait_a_little();
    // Anything else would mean giving up while the kernel owns buffers.
    else
      CHECK(outcome == -EINTR);
  }
}

size_t UringIo::reap(std::span<IoResult> results) {
  CHECK(!results.empty());
  if (!rejected_.empty()) {
    const size_t count = std::min(results.size(), rejected_.size());
    std::copy_n(rejected_.begin(), count, results.begin());
    rejected_.erase(rejected_.begin(), rejected_.begin() + static_cast<ptrdiff_t>(count));
    return count;
  }
  if (in_flight_ == 0) return 0;
  if (const size_t count = take_ready(results); count > 0) return count;
  wait_for_one();
  return take_ready(results);
}

/// 0 when a real read of the first file works on `io`, or fails on any backend.
int probe_error(AsyncIo& io, int fd) {
  alignas(kProbeBytes) std::array<std::byte, kProbeBytes> page;
  const IoRequest request{.file = 0,
                          .offset = 0,
                          .memory = page.data(),
                          .bytes = kProbeBytes,
                          .write = false,
                          .tag = 0};
  io.submit(std::span(&request, 1));
  IoResult result{};
  io.reap(std::span(&result, 1));
  if (result.error == 0) return 0;
  return pread(fd, page.data(), kProbeBytes, 0) < 0 ? 0 : result.error;
}

}  // namespace

io_backend::UringAttempt io_backend::make_uring_io(uint32_t depth, std::span<const int> files) {
  io_uring ring{};
  io_uring_params parameters{};
  parameters.flags = IORING_SETUP_CLAMP | IORING_SETUP_COOP_TASKRUN;
  int outcome = io_uring_queue_init_params(depth, &ring, &parameters);
  if (outcome == -EINVAL) {  // before Linux 5.19
    parameters = {};
    parameters.flags = IORING_SETUP_CLAMP;
    outcome = io_uring_queue_init_params(depth, &ring, &parameters);
  }
  if (outcome < 0) return {.io = nullptr, .step = "io_uring_setup", .error = -outcome};

  const uint32_t room = std::min(depth, parameters.sq_entries);
  auto io = std::make_unique<UringIo>(ring, room, files);
  if (!files.empty()) {
    if (const int error = probe_error(*io, files[0]); error != 0) {
      return {.io = nullptr, .step = "a read through io_uring", .error = error};
    }
  }
  return {.io = std::move(io)};
}

std::string describe_io_uring_features() {
  struct Flag {
    const char* name;
    uint32_t bits;
  };
  constexpr uint32_t kSingleIssuer = 1U << 12, kDeferTaskrun = 1U << 13;  // Linux 6.0, 6.1
  constexpr Flag kFlags[] = {{"coop_taskrun", IORING_SETUP_COOP_TASKRUN},
                             {"single_issuer", kSingleIssuer},
                             {"defer_taskrun", kSingleIssuer | kDeferTaskrun},
                             {"sqpoll", IORING_SETUP_SQPOLL},
                             {"iopoll", IORING_SETUP_IOPOLL}};
  std::string text;
  for (const Flag& flag : kFlags) {
    io_uring ring{};
    io_uring_params parameters{};
    parameters.flags = flag.bits;
    if (io_uring_queue_init_params(1, &ring, &parameters) < 0) continue;
    io_uring_queue_exit(&ring);
    text += (text.empty() ? "" : " ") + std::string(flag.name);
  }
  io_uring_probe* probe = io_uring_get_probe();
  if (probe == nullptr) return text.empty() ? "none" : text;
  uint32_t operations = 0;
  for (int op = 0; op <= probe->last_op; ++op) operations += io_uring_opcode_supported(probe, op);
  io_uring_free_probe(probe);
  return fmt::format("{}; {} operations", text.empty() ? "no flags" : text, operations);
}

}  // namespace overspill
