// Chooses the I/O backend and logs the choice once per process. A backend that sets up but cannot
// move bytes is as useless as none, so each moves every file's first page before it is taken.
// Thread-safe; moves no pages.
#include "nvme/async_io.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <fstream>
#include <utility>

#include "engine/base/error.h"
#include "engine/base/fd.h"
#include "engine/base/log.h"
#include "engine/base/units.h"
#include "nvme/io_backends.h"

namespace overspill {
namespace {

using io_backend::Attempt;

constexpr uint32_t kMaxDepth = 32768;  // io_uring's largest ring

/// The value of kernel.io_uring_disabled; 0 before Linux 6.6, which has no such setting.
int io_uring_disabled() {
  std::ifstream setting("/proc/sys/kernel/io_uring_disabled");
  int value = 0;
  return setting >> value ? value : 0;
}

std::string uring_refusal(const Attempt& attempt) {
  std::string text = fmt::format("{}: {}", attempt.step, errno_text(attempt.error));
  if (const int disabled = io_uring_disabled(); disabled != 0) {
    text += fmt::format("; kernel.io_uring_disabled={}", disabled);
  } else if (attempt.error == EPERM || attempt.error == EACCES) {
    text += "; a seccomp filter denies it";
  }
  return text;
}

const char* uring_cure(const Attempt& attempt) {
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

std::string libaio_refusal(const Attempt& attempt) {
  return attempt.error == 0 ? "files without O_DIRECT would block it"
                            : fmt::format("{}: {}", attempt.step, errno_text(attempt.error));
}

const char* libaio_cure(const Attempt& attempt) {
  switch (attempt.error) {
    case EAGAIN: return "raise sysctl fs.aio-max-nr";
    case EPERM:
    case EACCES: return "allow io_setup, io_submit and io_getevents in the seccomp profile";
    case ENOSYS: return "use a kernel built with CONFIG_AIO";
    default: return "check the kernel's log (dmesg)";
  }
}

/// The backend that `automatic` takes, and why not the ones before it.
struct Choice {
  std::unique_ptr<AsyncIo> io;
  Attempt uring;        // its io is moved to `io`
  std::string reasons;  // empty for io_uring
};

/// Polled where that works, else with interrupts.
Attempt make_uring_io(const IoOptions& options, std::span<const int> files) {
  const auto make = [&](bool polled) {
    return io_backend::make_uring_io(options.queue_depth, files, options.buffers, polled);
  };
  if (!options.poll || files.empty() || !io_backend::all_can_be_polled(files, options.block_size)) {
    return make(false);
  }
  Attempt polled = make(true);
  if (polled.io) return polled;
  Attempt made = make(false);
  static std::atomic<bool> logged{false};
  if (made.io && !logged.exchange(true)) {
    log_info("the drives have poll queues, but polling does not work ({}: {})", polled.step,
             errno_text(polled.error));
  }
  return made;
}

Choice choose(const IoOptions& options, std::span<const int> files, bool direct) {
  Choice choice;
  choice.uring = make_uring_io(options, files);
  choice.io = std::move(choice.uring.io);
  if (choice.io) return choice;
  choice.reasons = "io_uring: " + uring_refusal(choice.uring);
  Attempt libaio;
  if (direct) libaio = io_backend::make_libaio_io(options.queue_depth, files);
  choice.io = std::move(libaio.io);
  if (choice.io) return choice;
  choice.reasons += "; libaio: " + libaio_refusal(libaio);
  choice.io = io_backend::make_thread_pool_io(options.queue_depth, files);
  return choice;
}

void log_choice_once(const Choice& choice) {
  // A run opens a channel per lane, all with the same outcome: one line is enough.
  static std::atomic<bool> logged{false};
  if (logged.exchange(true)) return;
  if (choice.reasons.empty()) {
    log_info("NVMe I/O uses {}", choice.io->name());
    return;
  }
  log_info("NVMe I/O uses {} ({})", choice.io->name(), choice.reasons);
  log_warning("io_uring does not work here ({}); {} costs more CPU; to use io_uring, {}",
              uring_refusal(choice.uring), choice.io->name(), uring_cure(choice.uring));
}

void warn_of_buffers_once(const Attempt& uring, const IoOptions& options) {
  static std::atomic<bool> warned{false};
  if (uring.buffers_error == 0 || warned.exchange(true)) return;
  uint64_t bytes = 0;
  for (const std::span<std::byte> buffer : options.buffers) bytes += buffer.size();
  rlimit limit{};
  getrlimit(RLIMIT_MEMLOCK, &limit);
  log_warning(
      "io_uring cannot register {} of buffers ({}; the limit of locked memory is {}), so each "
      "request costs more CPU; raise the limit (ulimit -l unlimited, LimitMEMLOCK=infinity, or "
      "--ulimit memlock=-1 for containers)",
      format_bytes(bytes), errno_text(uring.buffers_error),
      limit.rlim_cur == RLIM_INFINITY ? "none" : format_bytes(limit.rlim_cur));
}

[[noreturn]] void refuse(IoBackend backend, const std::string& reason, const char* cure) {
  fail(ErrorCode::io,
       "I/O backend {} does not work here ({}); {}, or choose the backend auto or threads",
       io_backend_name(backend), reason, cure);
}

std::unique_ptr<AsyncIo> make_backend(const IoOptions& options, std::span<const int> files) {
  switch (options.backend) {
    case IoBackend::automatic: {
      Choice choice = choose(options, files, io_backend::all_direct(files));
      log_choice_once(choice);
      warn_of_buffers_once(choice.uring, options);
      return std::move(choice.io);
    }
    case IoBackend::io_uring: {
      Attempt made = make_uring_io(options, files);
      if (!made.io) refuse(options.backend, uring_refusal(made), uring_cure(made));
      warn_of_buffers_once(made, options);
      return std::move(made.io);
    }
    case IoBackend::libaio: {
      Attempt made = io_backend::make_libaio_io(options.queue_depth, files);
      if (!made.io) refuse(options.backend, libaio_refusal(made), libaio_cure(made));
      return std::move(made.io);
    }
    case IoBackend::threads: return io_backend::make_thread_pool_io(options.queue_depth, files);
    case IoBackend::memory: break;
  }
  CHECK(options.memory_files != nullptr);
  return io_backend::make_memory_io(options.queue_depth, files, options.memory_files);
}

}  // namespace

const char* io_backend_name(IoBackend backend) {
  switch (backend) {
    case IoBackend::automatic: return "auto";
    case IoBackend::io_uring: return "io_uring";
    case IoBackend::libaio: return "libaio";
    case IoBackend::threads: return "threads";
    case IoBackend::memory: return "memory";
  }
  return "?";
}

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
  if (!probe.valid() || ftruncate(probe.get(), io_backend::kProbeBytes) != 0) {
    fail(ErrorCode::io,
         "make a memory file to probe io_uring with: {}; raise ulimit -n or free "
         "memory",
         errno_text(errno));
  }
  const int fd = probe.get();
  IoOptions options;
  options.queue_depth = 1;
  const Choice choice = choose(options, std::span(&fd, 1), true);
  return choice.reasons.empty() ? choice.io->name()
                                : fmt::format("{} ({})", choice.io->name(), choice.reasons);
}

}  // namespace overspill
