// What every AsyncIo backend promises, run on each, and how the factory chooses between them.
#include "nvme/async_io.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <new>
#include <set>
#include <thread>

#include "engine/base/error.h"
#include "engine/base/fd.h"
#include "engine/base/random.h"

namespace overspill {
namespace {

namespace fs = std::filesystem;

struct Backend {
  const char* label;
  IoBackend kind;
  bool wrapped;         // in a FaultyIo that has no faults
  bool polled = false;  // over a raw device
};

constexpr size_t kPage = 4096;

/// Memory that O_DIRECT files take too.
template <class T>
struct PageAllocator {
  using value_type = T;
  T* allocate(size_t count) {
    return static_cast<T*>(::operator new (count * sizeof(T), std::align_val_t{kPage}));
  }
  void deallocate(T* memory, size_t) { ::operator delete (memory, std::align_val_t{kPage}); }
  bool operator==(const PageAllocator&) const = default;
};
using Bytes = std::vector<std::byte, PageAllocator<std::byte>>;

Bytes pattern(uint64_t key, size_t bytes) {
  Bytes made(bytes);
  for (size_t i = 0; i < bytes; ++i) {
    made[i] = static_cast<std::byte>(random_bits(key, i / 8) >> (i % 8 * 8));
  }
  return made;
}

class AsyncIoContract : public testing::TestWithParam<Backend> {
 protected:
  void SetUp() override {
    GTEST_FLAG_SET(death_test_style, "threadsafe");
    if (GetParam().kind == IoBackend::io_uring && describe_io_backend() != "io_uring") {
      GTEST_SKIP() << "no io_uring here: " << describe_io_backend();
    }
    memory_files_ = make_memory_files();
    std::string name = fs::temp_directory_path() / "overspill-io-XXXXXX";
    const int fd = mkstemp(name.data());
    ASSERT_GE(fd, 0);
    file_ = Fd(fd, name);
    unlink(name.c_str());
    if (!GetParam().polled) return;
    const char* device = std::getenv("OVERSPILL_POLLED_DEVICE");
    if (device == nullptr) {
      GTEST_SKIP() << "OVERSPILL_POLLED_DEVICE names no drive to overwrite (see tests/qemu/run)";
    }
    file_ = Fd(::open(device, O_RDWR | O_DIRECT), device);
    ASSERT_STREQ(open(1)->name(), "io_uring, polled");
  }

  std::unique_ptr<AsyncIo> open(uint32_t depth, std::vector<int> files) const {
    IoOptions options;
    options.backend = GetParam().kind;
    options.queue_depth = depth;
    options.memory_files = memory_files_;
    if (GetParam().polled) options.block_size = most_bytes();
    if (GetParam().wrapped) {
      options.wrap = [](std::unique_ptr<AsyncIo> io) { return make_faulty_io(std::move(io), {}); };
    }
    return make_async_io(options, files);
  }
  std::unique_ptr<AsyncIo> open(uint32_t depth) const { return open(depth, {file_.get()}); }

  /// What polled requests can have on most drives.
  static size_t most_bytes() { return GetParam().polled ? 64 << 10 : 4 << 20; }

  static IoRequest request(bool write, uint64_t offset, std::span<std::byte> memory,
                           uint64_t tag = 0) {
    return {.file = 0,
            .offset = offset,
            .memory = memory.data(),
            .bytes = static_cast<uint32_t>(memory.size()),
            .write = write,
            .tag = tag};
  }

  static IoResult run(AsyncIo& io, const IoRequest& request) {
    io.submit(std::span(&request, 1));
    IoResult result{};
    EXPECT_EQ(io.reap(std::span(&result, 1)), 1u);
    EXPECT_EQ(result.tag, request.tag);
    return result;
  }

  /// What lies in the file, whatever the backend calls a file.
  void read_back(std::span<std::byte> in) {
    if (GetParam().kind != IoBackend::memory) return read_exact(file_, 0, in);
    EXPECT_EQ(run(*open(1), request(false, 0, in)).bytes, in.size());
  }

  Fd file_;
  std::shared_ptr<MemoryFiles> memory_files_;
};

TEST_P(AsyncIoContract, ReturnsWhatWasWritten) {
  const auto io = open(4);
  uint64_t offset = 0, tag = 0;
  for (const size_t bytes : {1u, 511u, 512u, 4095u, 4096u, 4097u, 65536u, 1000003u, 4u << 20}) {
    if (GetParam().polled && (bytes % kPage != 0 || bytes > most_bytes())) continue;
    Bytes out = pattern(bytes, bytes), in(bytes);
    const IoResult written = run(*io, request(true, offset, out, ++tag));
    EXPECT_EQ(written.error, 0);
    EXPECT_EQ(written.bytes, bytes);
    const IoResult read = run(*io, request(false, offset, in, ++tag));
    EXPECT_EQ(read.error, 0);
    EXPECT_EQ(read.bytes, bytes);
    EXPECT_EQ(in, out) << bytes << " bytes";
    offset += bytes;
  }
}

TEST_P(AsyncIoContract, ReportsEveryRequestOfAFullQueueOnce) {
  constexpr size_t kBytes = 8192;
  const auto io = open(16);
  ASSERT_EQ(io->depth(), 16u);
  Bytes out = pattern(1, 16 * kBytes), in(16 * kBytes);
  for (const bool write : {true, false}) {
    std::span<std::byte> memory = write ? out : in;
    std::vector<IoRequest> requests;
    for (size_t i = 0; i < 16; ++i) {
      requests.push_back(request(write, i * kBytes, memory.subspan(i * kBytes, kBytes), 100 + i));
    }
    io->submit(requests);
    std::set<uint64_t> tags;
    std::vector<IoResult> results(5);
    while (tags.size() < 16) {
      const size_t count = io->reap(results);
      ASSERT_GT(count, 0u);
      for (const IoResult& result : std::span(results).first(count)) {
        EXPECT_EQ(result.error, 0);
        EXPECT_EQ(result.bytes, kBytes);
        EXPECT_TRUE(tags.insert(result.tag).second) << "tag " << result.tag << " twice";
      }
    }
    EXPECT_EQ(*tags.begin(), 100u);
    EXPECT_EQ(*tags.rbegin(), 115u);
  }
  EXPECT_EQ(in, out);
}

TEST_P(AsyncIoContract, RefillsTheQueueManyTimes) {
  const auto io = open(3);
  Bytes page(4096);
  std::vector<IoResult> results(3);
  uint64_t submitted = 0, reaped = 0, tag_sum = 0;
  while (reaped < 1000) {
    while (submitted < 1000 && submitted - reaped < 3) {
      const IoRequest next = request(true, submitted % 7 * 4096, page, submitted);
      io->submit(std::span(&next, 1));
      ++submitted;
    }
    const size_t count = io->reap(results);
    for (const IoResult& result : std::span(results).first(count)) tag_sum += result.tag;
    reaped += count;
  }
  EXPECT_EQ(tag_sum, 999u * 1000 / 2);
}

TEST_P(AsyncIoContract, ReapsNothingWhenIdle) {
  const auto io = open(2);
  IoResult result{};
  EXPECT_EQ(io->reap(std::span(&result, 1)), 0u);
}

TEST_P(AsyncIoContract, RejectsMoreThanItsDepth) {
  const auto io = open(2);
  Bytes page(4096);
  const std::vector<IoRequest> three(3, request(false, 0, page));
  EXPECT_DEATH(io->submit(three), "CHECK");
}

TEST_P(AsyncIoContract, ReadsShortAtTheEnd) {
  if (GetParam().polled) GTEST_SKIP() << "a drive does not end within a page";
  const auto io = open(2);
  Bytes page = pattern(2, 5000);
  run(*io, request(true, 0, page));
  Bytes in(8192);
  const IoResult partial = run(*io, request(false, 4096, in));
  EXPECT_EQ(partial.error, 0);
  EXPECT_EQ(partial.bytes, 5000u - 4096u);
  const IoResult none = run(*io, request(false, 8192, in));
  EXPECT_EQ(none.error, 0);
  EXPECT_EQ(none.bytes, 0u);
}

TEST_P(AsyncIoContract, ReportsABadDescriptorAsAValue) {
  for (const int bad : {-1, 1 << 20}) {
    const auto io = open(2, {bad, file_.get()});
    Bytes page(4096);
    EXPECT_EQ(run(*io, request(false, 0, page)).error, EBADF) << "descriptor " << bad;
    IoRequest good = request(true, 0, page);
    good.file = 1;
    EXPECT_EQ(run(*io, good).error, 0);
  }
}

TEST_P(AsyncIoContract, ReportsAReadOnlyDescriptorAsAValue) {
  const Fd read_only(::open(("/proc/self/fd/" + std::to_string(file_.get())).c_str(), O_RDONLY),
                     "read-only");
  ASSERT_TRUE(read_only.valid());
  const auto io = open(2, {read_only.get()});
  Bytes page(4096);
  EXPECT_EQ(run(*io, request(true, 0, page)).error, EBADF);
}

TEST_P(AsyncIoContract, FinishesWhatIsInFlightWhenDestroyed) {
  const size_t bytes = std::min<size_t>(most_bytes(), 1 << 20);
  Bytes out = pattern(3, 16 * bytes), in(16 * bytes);
  {
    const auto io = open(16);
    std::vector<IoRequest> requests;
    for (size_t i = 0; i < 16; ++i) {
      requests.push_back(request(true, i * bytes, std::span(out).subspan(i * bytes, bytes), i));
    }
    io->submit(requests);
  }
  read_back(in);
  EXPECT_EQ(in, out);
}

TEST_P(AsyncIoContract, ReportsEveryRequestOnceAfterACancel) {
  const size_t bytes = std::min<size_t>(most_bytes(), 1 << 20);
  const auto io = open(8);
  Bytes out = pattern(5, 8 * bytes), in(8 * bytes);
  std::vector<IoRequest> requests;
  for (size_t i = 0; i < 8; ++i) {
    requests.push_back(request(true, i * bytes, std::span(out).subspan(i * bytes, bytes), i));
  }
  io->cancel();  // of nothing
  io->submit(requests);
  io->cancel();
  std::vector<IoResult> results(8);
  size_t reaped = 0;
  while (reaped < 8) {
    const size_t count = io->reap(results, std::chrono::milliseconds(60000));
    ASSERT_GT(count, 0u);
    reaped += count;
    for (const IoResult& result : std::span(results).first(count)) {
      if (result.error != ECANCELED) {
        EXPECT_EQ(result.error, 0);
        EXPECT_EQ(result.bytes, bytes);
      }
    }
  }
  EXPECT_EQ(io->reap(results, std::chrono::milliseconds(1)), 0u);
  io->submit(requests);  // a cancel is over when its requests are
  for (reaped = 0; reaped < 8;) reaped += io->reap(results);
  read_back(in);
  EXPECT_EQ(in, out);
}

TEST_P(AsyncIoContract, MayBeUsedByAnotherThreadThanItsMaker) {
  auto io = open(4);
  Bytes page = pattern(4, 4096);
  std::thread([&] { EXPECT_EQ(run(*io, request(true, 0, page)).error, 0); }).join();
  std::thread([&] {
    EXPECT_EQ(run(*io, request(false, 0, page)).bytes, 4096u);
    io.reset();
  }).join();
}

INSTANTIATE_TEST_SUITE_P(Backends, AsyncIoContract,
                         testing::Values(Backend{"io_uring", IoBackend::io_uring, false},
                                         Backend{"polled", IoBackend::io_uring, false, true},
                                         Backend{"libaio", IoBackend::libaio, false},
                                         Backend{"memory", IoBackend::memory, false},
                                         Backend{"threads", IoBackend::threads, false},
                                         Backend{"automatic", IoBackend::automatic, false},
                                         Backend{"faultless", IoBackend::threads, true}),
                         [](const auto& instance) { return std::string(instance.param.label); });

TEST(AsyncIoFactory, RefusesADepthOfZero) {
  IoOptions options;
  options.queue_depth = 0;
  try {
    make_async_io(options, {});
    FAIL() << "no Error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_config);
    EXPECT_STREQ(error.what(), "I/O queue depth 0 is out of range; choose 1 to 32768");
  }
}

TEST(AsyncIoFactory, AutomaticAgreesWithItsDescription) {
  std::string expected = describe_io_backend();
  expected = expected.substr(0, expected.find(' '));
  EXPECT_EQ(make_async_io({}, {})->name(), expected);
}

/// Makes io_uring_setup fail with EPERM in this process from now on, as a container's filter does.
bool deny_io_uring() {
  sock_filter program[] = {
      {BPF_LD | BPF_W | BPF_ABS, 0, 0, offsetof(seccomp_data, nr)},
      {BPF_JMP | BPF_JEQ | BPF_K, 0, 1, __NR_io_uring_setup},
      {BPF_RET | BPF_K, 0, 0, SECCOMP_RET_ERRNO | EPERM},
      {BPF_RET | BPF_K, 0, 0, SECCOMP_RET_ALLOW},
  };
  const sock_fprog filter{.len = 4, .filter = program};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0;
}

constexpr int kCannotDeny = 77;

/// Runs in a child process: its exit code says what went wrong, stderr is matched by the test.
[[noreturn]] void use_denied_io_uring() {
  if (!deny_io_uring()) _exit(kCannotDeny);
  std::fprintf(stderr, "describes: %s\n", describe_io_backend().c_str());
  for (int i = 0; i < 3; ++i) std::fprintf(stderr, "took: %s\n", make_async_io({}, {})->name());
  const Fd buffered(memfd_create("buffered", MFD_CLOEXEC), "buffered");
  const std::array<int, 1> files = {buffered.get()};
  std::fprintf(stderr, "took: %s\n", make_async_io({}, files)->name());
  IoOptions options;
  options.backend = IoBackend::io_uring;
  try {
    make_async_io(options, {});
    _exit(1);
  } catch (const Error& error) {
    std::fprintf(stderr, "%s: %s\n", error_code_name(error.code()), error.what());
  }
  _exit(0);
}

TEST(AsyncIoFactory, FallsBackToLibaioWithReasonAndCureWhenIoUringIsDenied) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  if (describe_io_backend() != "io_uring") GTEST_SKIP() << describe_io_backend();
  EXPECT_EXIT(
      use_denied_io_uring(), testing::ExitedWithCode(0),
      "describes: libaio \\(io_uring: io_uring_setup: Operation not permitted; a seccomp filter "
      "denies it\\)(.|\n)*NVMe I/O uses libaio \\(io_uring: io_uring_setup: Operation not permitted"
      "(.|\n)*io_uring does not work here(.|\n)*libaio costs more CPU; to use io_uring, allow "
      "io_uring_setup(.|\n)*took: libaio\ntook: libaio\ntook: libaio\n"  // nothing logged between
      "took: threads\n"  // for a file without O_DIRECT
      "io: I/O backend io_uring does not work here \\(io_uring_setup: Operation not permitted; a "
      "seccomp filter denies it\\); allow io_uring_setup.*or choose the backend auto");
}

constexpr size_t kBuffer = 1 << 20;

/// Round trips through memory in, between and outside of registered buffers.
void move_with_buffers(std::span<std::byte> memory, int fd) {
  IoOptions options;
  options.backend = IoBackend::io_uring;
  // Two buffers that touch: a request over their seam is in neither.
  options.buffers = {memory.subspan(2 * kBuffer, kBuffer), memory.subspan(kBuffer, kBuffer)};
  const auto io = make_async_io(options, std::span(&fd, 1));
  const Bytes out = pattern(7, kBuffer);
  for (const size_t begin :
       {0ul, kBuffer / 2, kBuffer, 3 * kBuffer / 2, 2 * kBuffer, 5 * kBuffer / 2, 3 * kBuffer}) {
    const std::span<std::byte> part = memory.subspan(begin, kBuffer);
    for (const bool write : {true, false}) {
      if (write)
        std::copy(out.begin(), out.end(), part.begin());
      else
        std::fill(part.begin(), part.end(), std::byte{0});
      const IoRequest request{.file = 0,
                              .offset = 8192,
                              .memory = part.data(),
                              .bytes = kBuffer,
                              .write = write,
                              .tag = 1};
      io->submit(std::span(&request, 1));
      IoResult result{};
      ASSERT_EQ(io->reap(std::span(&result, 1)), 1u);
      ASSERT_EQ(result.error, 0) << errno_text(result.error);
      ASSERT_EQ(result.bytes, kBuffer);
    }
    ASSERT_TRUE(std::equal(out.begin(), out.end(), part.begin())) << "at " << begin;
  }
}

TEST(AsyncIoFactory, MovesMemoryInAndOutsideOfRegisteredBuffers) {
  if (describe_io_backend() != "io_uring") GTEST_SKIP() << describe_io_backend();
  const Fd file(memfd_create("buffers", MFD_CLOEXEC), "buffers");
  Bytes memory(4 * kBuffer);
  move_with_buffers(memory, file.get());
}

/// Runs in a child process, as a user without the right to lock memory.
[[noreturn]] void register_beyond_the_limit() {
  const rlimit limit{.rlim_cur = 64 << 10, .rlim_max = 64 << 10};
  if (setrlimit(RLIMIT_MEMLOCK, &limit) != 0 || setuid(65534) != 0) _exit(kCannotDeny);
  const Fd file(memfd_create("buffers", MFD_CLOEXEC), "buffers");
  Bytes memory(4 * kBuffer);
  for (int i = 0; i < 2; ++i) {
    move_with_buffers(memory, file.get());
    std::fprintf(stderr, "moved\n");
  }
  _exit(testing::Test::HasFailure() ? 1 : 0);
}

TEST(AsyncIoFactory, WarnsOnceAndWorksWhenBuffersCannotBeLocked) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  if (describe_io_backend() != "io_uring") GTEST_SKIP() << describe_io_backend();
  if (geteuid() != 0) GTEST_SKIP() << "changes the user, which only root may";
  EXPECT_EXIT(
      register_beyond_the_limit(), testing::ExitedWithCode(0),
      "io_uring cannot register 2.00 MiB of buffers \\(Cannot allocate memory; the limit of "
      "locked memory is 64.00 KiB\\), so each request costs more CPU; raise the limit "
      "\\(ulimit -l unlimited.*\nmoved\nmoved\n");
}

}  // namespace
}  // namespace overspill
