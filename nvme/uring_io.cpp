// AsyncIo over one io_uring, with registered files and buffers where the kernel takes them. Setup
// flags are COOP_TASKRUN, and IOPOLL for raw devices with poll queues; docs/decisions/008 has
// the figures. One thread at a time.
#include <fmt/format.h>
#include <liburing.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <memory>
#include <numeric>
#include <span>
#include <thread>
#include <vector>

#include "engine/base/error.h"
#include "nvme/io_backends.h"

#ifndef IORING_SETUP_COOP_TASKRUN
#define IORING_SETUP_COOP_TASKRUN (1U << 8)  // Linux 5.19
#endif

namespace overspill {
namespace {

constexpr int kSubmitTries = 1000;  // of a millisecond each, while the kernel is out of memory

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr int64_t kSecond = 1'000'000'000;              // in nanoseconds
constexpr uint64_t kLargestBuffer = uint64_t{1} << 30;  // the kernel's limit
constexpr size_t kMostBuffers = 1 << 14;                // and another
// A polling thread yields for as long as a small request takes, then sleeps more and more: large
// requests take longer, and the processor is wanted for compute.
constexpr std::chrono::microseconds kYielding{50}, kLongestSleep{1000};
constexpr uint64_t kNoTag = UINT64_MAX;
constexpr uint64_t kCancellation = UINT64_MAX - 1;  // user_data of what is not a request

bool passing(int error) { return error == EAGAIN || error == EBUSY; }
void wait_a_little() { std::this_thread::sleep_for(std::chrono::milliseconds(1)); }

class UringIo final : public AsyncIo {
 public:
  /// Takes over an initialised ring.
  UringIo(const io_uring& ring, uint32_t depth, std::span<const int> files, bool polled);
  ~UringIo() override;
  UringIo(const UringIo&) = delete;
  UringIo& operator=(const UringIo&) = delete;

  const char* name() const override { return polled_ ? "io_uring, polled" : "io_uring"; }
  uint32_t depth() const override { return depth_; }
  void submit(std::span<const IoRequest> requests) override;
  size_t reap(std::span<IoResult> results, milliseconds timeout) override;
  void wait_for(uint32_t completions) override { wanted_ = completions; }
  void cancel() override;

  /// Moves the first page of every file, through a registered buffer where there are any.
  io_backend::ProbeFailure probe() { return io_backend::probe_io(*this, files_, page_.get()); }
  /// Registers memory; returns 0 or the errno, and works without then.
  int register_buffers(std::span<const std::span<std::byte>> buffers);
  void unregister_buffers();

 private:
  void prepare(const IoRequest& request);
  /// Index of the registered buffer that holds all of a request's memory, or -1.
  int buffer_of(const IoRequest& request) const;
  /// Hands all prepared entries to the kernel; returns 0 or the errno that will not pass.
  int enter();
  size_t take_ready(std::span<IoResult> results);
  /// False when fewer than wanted_ completed until then.
  bool wait_for_wanted(Clock::time_point end);
  bool poll_until(Clock::time_point end);

  io_uring ring_;
  uint32_t depth_;
  bool polled_;
  std::vector<int> files_;
  const io_backend::ProbePage page_ = io_backend::make_probe_page();
  bool registered_ = false;
  uint32_t in_flight_ = 0;          // handed to the kernel, not reaped
  uint32_t wanted_ = 1;             // completions worth waking up for
  int broken_ = 0;                  // errno after which nothing is submitted any more
  std::vector<iovec> buffers_;      // registered, by address
  std::vector<uint64_t> tags_;      // of the requests in the kernel, by their user_data
  std::vector<uint32_t> free_;      // indices into tags_
  std::vector<IoResult> rejected_;  // requests the kernel never took
};

UringIo::UringIo(const io_uring& ring, uint32_t depth, std::span<const int> files, bool polled)
    : ring_(ring), depth_(depth), polled_(polled), files_(files.begin(), files.end()) {
  rejected_.reserve(depth);
  tags_.resize(depth, kNoTag);
  free_.resize(depth);
  std::iota(free_.rbegin(), free_.rend(), 0u);
  // Registered files save a lookup per request. A kernel or a limit that refuses costs just that.
  registered_ =
      !files_.empty() &&
      io_uring_register_files(&ring_, files_.data(), static_cast<unsigned>(files_.size())) == 0;
}

UringIo::~UringIo() {
  std::array<IoResult, 64> ignored;
  while (in_flight_ > 0) reap(ignored, kForever);  // the kernel may still write to the buffers
  // The kernel tears a ring down later; until then a registered, deleted file would keep its space.
  if (registered_) io_uring_unregister_files(&ring_);
  unregister_buffers();
  io_uring_queue_exit(&ring_);
}

int UringIo::register_buffers(std::span<const std::span<std::byte>> buffers) {
  for (const std::span<std::byte> buffer : buffers) {
    for (size_t at = 0; at < buffer.size(); at += kLargestBuffer) {
      buffers_.push_back({buffer.data() + at, std::min(kLargestBuffer, buffer.size() - at)});
    }
  }
  if (buffers_.empty()) return 0;
  buffers_.push_back({page_.get(), io_backend::kProbeBytes});
  std::ranges::sort(buffers_, {}, [](const iovec& buffer) { return buffer.iov_base; });
  const int outcome = buffers_.size() > kMostBuffers
                          ? -E2BIG
                          : io_uring_register_buffers(&ring_, buffers_.data(),
                                                      static_cast<unsigned>(buffers_.size()));
  if (outcome != 0) buffers_.clear();
  return -outcome;
}

void UringIo::unregister_buffers() {
  if (!buffers_.empty()) io_uring_unregister_buffers(&ring_);
  buffers_.clear();
}

int UringIo::buffer_of(const IoRequest& request) const {
  const auto after = std::ranges::upper_bound(buffers_, static_cast<void*>(request.memory), {},
                                              [](const iovec& buffer) { return buffer.iov_base; });
  if (after == buffers_.begin()) return -1;
  const iovec& buffer = *(after - 1);
  const std::byte* const end = static_cast<std::byte*>(buffer.iov_base) + buffer.iov_len;
  return request.memory + request.bytes <= end ? static_cast<int>(after - buffers_.begin()) - 1
                                               : -1;
}

void UringIo::prepare(const IoRequest& request) {
  CHECK(request.file < files_.size());
  io_uring_sqe* entry = io_uring_get_sqe(&ring_);
  CHECK(entry != nullptr);
  const int fd = registered_ ? static_cast<int>(request.file) : files_[request.file];
  const int buffer = buffers_.empty() ? -1 : buffer_of(request);
  if (buffer >= 0 && request.write) {
    io_uring_prep_write_fixed(entry, fd, request.memory, request.bytes, request.offset, buffer);
  } else if (buffer >= 0) {
    io_uring_prep_read_fixed(entry, fd, request.memory, request.bytes, request.offset, buffer);
  } else if (request.write) {
    io_uring_prep_write(entry, fd, request.memory, request.bytes, request.offset);
  } else {
    io_uring_prep_read(entry, fd, request.memory, request.bytes, request.offset);
  }
  if (registered_) io_uring_sqe_set_flags(entry, IOSQE_FIXED_FILE);
  const uint32_t index = free_.back();
  free_.pop_back();
  tags_[index] = request.tag;
  entry->user_data = index;
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
  size_t taken = 0;
  for (unsigned i = 0; i < count; ++i) {
    const uint64_t index = ready[i]->user_data;
    if (index >= tags_.size()) continue;  // of a cancellation, or an old kernel's timeout
    const int32_t outcome = ready[i]->res;
    results[taken++] = {.tag = tags_[index],
                        .bytes = outcome < 0 ? 0 : static_cast<uint32_t>(outcome),
                        .error = outcome < 0 ? -outcome : 0};
    tags_[index] = kNoTag;
    free_.push_back(static_cast<uint32_t>(index));
  }
  io_uring_cq_advance(&ring_, count);
  in_flight_ -= static_cast<uint32_t>(taken);
  return taken;
}

bool UringIo::wait_for_wanted(Clock::time_point end) {
  if (polled_) return poll_until(end);
  io_uring_cqe* first = nullptr;
  const uint32_t wanted = std::clamp(wanted_, 1u, std::max(in_flight_, 1u));
  for (;;) {
    int outcome;
    if (end == Clock::time_point::max()) {
      outcome = io_uring_wait_cqes(&ring_, &first, wanted, nullptr, nullptr);
    } else {
      const auto left = std::max(Clock::duration{0}, end - Clock::now());
      const auto nanoseconds = std::chrono::duration_cast<std::chrono::nanoseconds>(left).count();
      __kernel_timespec limit{.tv_sec = nanoseconds / kSecond, .tv_nsec = nanoseconds % kSecond};
      outcome = io_uring_wait_cqes(&ring_, &first, wanted, &limit, nullptr);
    }
    if (outcome == 0) return true;
    if (outcome == -ETIME) return false;
    if (passing(-outcome)) wait_a_little();
    // Anything else would mean giving up while the kernel owns buffers.
    else
      CHECK(outcome == -EINTR);
  }
}

/// Nothing else finds completions of polled requests, and the kernel would poll without a limit.
/// One is always enough: the kernel polls for no second while the first has not been reaped.
bool UringIo::poll_until(Clock::time_point end) {
  const Clock::time_point start = Clock::now();
  for (;;) {
    const int outcome =
        io_uring_enter(static_cast<unsigned>(ring_.ring_fd), 0, 0, IORING_ENTER_GETEVENTS, nullptr);
    // Anything else would mean giving up while the kernel owns buffers.
    CHECK(outcome >= 0 || passing(-outcome) || outcome == -EINTR);
    if (io_uring_cq_ready(&ring_) > 0) return true;
    const Clock::time_point now = Clock::now();
    if (now >= end) return false;
    if (now - start < kYielding) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::min<Clock::duration>((now - start) / 4, kLongestSleep));
    }
  }
}

size_t UringIo::reap(std::span<IoResult> results, milliseconds timeout) {
  CHECK(!results.empty());
  if (!rejected_.empty()) {
    const size_t count = std::min(results.size(), rejected_.size());
    std::copy_n(rejected_.begin(), count, results.begin());
    rejected_.erase(rejected_.begin(), rejected_.begin() + static_cast<ptrdiff_t>(count));
    return count;
  }
  if (in_flight_ == 0) return 0;
  if (const size_t count = take_ready(results); count > 0) return count;
  const auto end = timeout == kForever ? Clock::time_point::max() : Clock::now() + timeout;
  while (wait_for_wanted(end)) {
    if (const size_t count = take_ready(results); count > 0) return count;
  }
  return take_ready(results);
}

void UringIo::cancel() {
  // A polled request is in its drive's queue, from where nothing can be taken back.
  if (broken_ != 0 || polled_) return;
  for (uint32_t index = 0; index < tags_.size(); ++index) {
    if (tags_[index] == kNoTag) continue;
    io_uring_sqe* entry = io_uring_get_sqe(&ring_);
    if (entry == nullptr) break;
    io_uring_prep_cancel64(entry, index, 0);
    entry->user_data = kCancellation;
  }
  broken_ = enter();
}

}  // namespace

io_backend::Attempt io_backend::make_uring_io(uint32_t depth, std::span<const int> files,
                                              std::span<const std::span<std::byte>> buffers,
                                              bool polled) {
  const uint32_t flags = IORING_SETUP_CLAMP | (polled ? IORING_SETUP_IOPOLL : 0);
  io_uring ring{};
  io_uring_params parameters{};
  parameters.flags = flags | IORING_SETUP_COOP_TASKRUN;
  int outcome = io_uring_queue_init_params(depth, &ring, &parameters);
  if (outcome == -EINVAL) {  // before Linux 5.19
    parameters = {};
    parameters.flags = flags;
    outcome = io_uring_queue_init_params(depth, &ring, &parameters);
  }
  if (outcome < 0) return {.io = nullptr, .step = "io_uring_setup", .error = -outcome};

  const uint32_t room = std::min(depth, parameters.sq_entries);
  auto io = std::make_unique<UringIo>(ring, room, files, polled);
  if (const ProbeFailure failure = io->probe(); failure.error != 0) {
    return {.io = nullptr, .step = failure.step, .error = failure.error};
  }
  int buffers_error = io->register_buffers(buffers);
  if (buffers_error == 0) buffers_error = io->probe().error;
  if (buffers_error != 0) io->unregister_buffers();
  return {.io = std::move(io), .buffers_error = buffers_error};
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
  text = fmt::format("{}; {} operations", text.empty() ? "no flags" : text, operations);
  const std::vector<std::string> drives = io_backend::drives_with_poll_queues();
  if (!drives.empty()) text += fmt::format("; poll queues on {}", fmt::join(drives, ", "));
  return text;
}

}  // namespace overspill
