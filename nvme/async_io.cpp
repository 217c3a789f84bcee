// Chooses the I/O backend and logs the choice once per process. An io_uring that sets up but
// cannot read is as useless as none, so the backend itself makes a real read before it is taken.
// Thread-safe; moves no pages.
#include "nvme/async_io.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <fstream>
#include <utility>

#include "engine/base/error.h"
#include "engine/base/fd.h"
#include "engine/base/log.h"

namespace overspill {
namespace {

using io_backend::UringAttempt;

constexpr uint32_t kMaxDepth = 32768;  // io_uring's largest ring

/// The value of kernel.io_uring_disabled; 0 before Linux 6.6, which has no such setting.
int io_uring_disabled() {
  std::ifstream setting("/proc/sys/kernel/io_uring_disabled");
  int value = 0;
  return setting >> value ? value : 0;
}

std::string refusal_text(const UringAttempt& attempt) {
  std::string text = fmt::format("{}: {}", attempt.step, errno_text(attempt.error));
  if (const int disabled = io_uring_disabled(); disabled != 0) {
    text += fmt::format("; kernel.io_uring_disabled={}", disabled);
  } else if (attempt.error == EPERM || attempt.error == EACCES) {
    text += "; a seccomp filter denies it";
  }
  return text;
}

const char* refusal_cure(const UringAttempt& attempt) {
  if (io_uring_disabled() != 0) {
    return "set sysctl kernel.io_uring_disabled=0, or 1 and join the group kernel.io_uring_group";
  }
  switch (attempt.error) {
    case EPERM:
    case EACCES:
      return "allow io_uring_setup, io_uring_enter and io_uring_register in the container's "
             "seccomp profile";
    case ENOSYS: return "use Linux 5.10 or later, built with CONFIG_IO_URING";
    case ENOMEM: return "raise the locked-memory limit (ulimit -l)";
    case EMFILE:
    case ENFILE: return "raise the limit of open files (ulimit -n)";
    default: return "check the kernel's log (dmesg)";
  }
}

void log_choice_once(const UringAttempt& attempt) {
  // A run opens a channel per lane, all with the same outcome: one line is enough.
  static std::atomic<bool> logged{false};
  if (logged.exchange(true)) return;
  if (attempt.io) {
    log_info("NVMe I/O uses io_uring");
    return;
  }
  log_info("NVMe I/O uses threads ({})", refusal_text(attempt));
  log_warning("io_uring does not work here ({}); threads cost more CPU; to use it, {}",
              refusal_text(attempt), refusal_cure(attempt));
}

std::unique_ptr<AsyncIo> make_backend(const IoOptions& options, std::span<const int> files) {
  if (options.backend == IoBackend::threads) {
    return io_backend::make_thread_pool_io(options.queue_depth, files);
  }
  UringAttempt attempt = io_backend::make_uring_io(options.queue_depth, files);
  if (options.backend == IoBackend::automatic) {
    log_choice_once(attempt);
    if (!attempt.io) return io_backend::make_thread_pool_io(options.queue_depth, files);
  } else if (!attempt.io) {
    fail(ErrorCode::io,
         "I/O backend io_uring does not work here ({}); {}, or choose the backend automatic or "
         "threads",
         refusal_text(attempt), refusal_cure(attempt));
  }
  return std::move(attempt.io);
}

}  // namespace

std::unique_ptr<AsyncIo> make_async_io(const IoOptions& options, std::span<const int> files) {
  if (options.queue_depth == 0 || options.queue_depth > kMaxDepth) {
    fail(ErrorCode::invalid_config, "I/O queue depth {} is out of range; choose 1 to {}",
         options.queue_depth, kMaxDepth);
  }
  std::unique_ptr<AsyncIo> io = make_backend(options, files);
  return options.wrap ? options.wrap(std::move(io)) : std::move(io);
}

std::string describe_io_backend() {
  const Fd probe(memfd_create("overspill-probe", MFD_CLOEXEC), "memfd:overspill-probe");
  if (!probe.valid() || ftruncate(probe.get(), 4096) != 0) {
    fail(ErrorCode::io,
         "make a memory file to probe io_uring with: {}; raise ulimit -n or free "
         "memory",
         errno_text(errno));
  }
  const int fd = probe.get();
  const UringAttempt attempt = io_backend::make_uring_io(1, std::span(&fd, 1));
  return attempt.io ? "io_uring" : fmt::format("threads ({})", refusal_text(attempt));
}

}  // namespace overspill
