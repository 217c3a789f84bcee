// Asynchronous reads and writes of a fixed set of open files. An instance is used by one thread.
// Buffers must stay valid until their result is reaped. Requests complete in any order.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace overspill {

/// One transfer. With O_DIRECT files, offset, memory and bytes are multiples of 4096.
struct IoRequest {
  uint32_t file;    ///< index into the files given at construction
  uint64_t offset;  ///< bytes from the start of the file
  std::byte* memory;
  uint32_t bytes;
  bool write;
  uint64_t tag;  ///< returned with the result
};

/// A completion: bytes moved (may be short), or an errno.
struct IoResult {
  uint64_t tag;
  uint32_t bytes;
  int error;  ///< 0, or a positive errno
};

/// A wait without end.
inline constexpr std::chrono::milliseconds kForever = std::chrono::milliseconds::max();

class AsyncIo {
 public:
  /// Waits for what is in flight.
  virtual ~AsyncIo() = default;
  /// Name of the backend: "io_uring", "io_uring, polled", "threads".
  virtual const char* name() const = 0;
  /// Most requests that may be in flight.
  virtual uint32_t depth() const = 0;
  /// Starts requests; the caller keeps in-flight requests at or below depth().
  virtual void submit(std::span<const IoRequest> requests) = 0;
  /// Waits for at least one completion when any is in flight; returns how many were stored. 0 when
  /// none came within `timeout`, or none is in flight.
  virtual size_t reap(std::span<IoResult> results,
                      std::chrono::milliseconds timeout = kForever) = 0;
  /// A hint for the next reap() calls: the caller has nothing to do before so many of the requests
  /// in flight are done, and need not be woken for each.
  virtual void wait_for(uint32_t completions) { (void)completions; }
  /// Asks for an early end of all that is in flight. Each request still has to be reaped: with
  /// ECANCELED, or with its outcome where it could not be stopped (polled requests never can).
  virtual void cancel() = 0;
};

/// `memory` is for tests: it needs IoOptions::memory_files, and files only name its contents.
enum class IoBackend : uint8_t { automatic, io_uring, libaio, threads, memory };
const char* io_backend_name(IoBackend backend);

/// Contents of the `memory` backend, shared by those that shall see the same files.
class MemoryFiles;
std::shared_ptr<MemoryFiles> make_memory_files();

struct IoOptions {
  IoBackend backend = IoBackend::automatic;
  uint64_t block_size = 1 << 20;  ///< largest single request, a multiple of 4096
  uint32_t queue_depth = 16;      ///< requests in flight per lane
  /// Writes in flight per drive while the same drive has reads in flight.
  uint32_t write_depth = 4;
  /// Poll for completions, where all files are raw devices with poll queues fit for block_size.
  bool poll = true;
  bool verify = true;  ///< keep checksums of what is written, and check what is read
  /// How long a request may take before the run ends; 0 or less: for ever.
  std::chrono::milliseconds timeout{60000};
  /// Memory that requests will use, to be registered with the kernel where that saves work. Other
  /// memory works too. Must outlive the backend.
  std::vector<std::span<std::byte>> buffers{};
  std::shared_ptr<MemoryFiles> memory_files{};
  /// Tests put a fault-injecting wrapper around the backend here.
  std::function<std::unique_ptr<AsyncIo>(std::unique_ptr<AsyncIo>)> wrap{};
};

/// Opens a backend over the files. `automatic` takes the first of io_uring, libaio and threads that
/// moves the first page of every file (libaio only for O_DIRECT files: for others it blocks); an
/// explicit backend that cannot work is an Error(io) saying why and what to set.
std::unique_ptr<AsyncIo> make_async_io(const IoOptions& options, std::span<const int> files);

/// What `automatic` would choose here for O_DIRECT files, and why: "io_uring", or
/// "libaio (io_uring: io_uring_setup: Operation not permitted; kernel.io_uring_disabled=2)".
std::string describe_io_backend();

/// The ring flags and operations this kernel offers and the drives with poll queues, such as
/// "coop_taskrun sqpoll iopoll; 49 operations; poll queues on nvme0n1"; "none" without io_uring.
std::string describe_io_uring_features();

enum class FaultKind : uint8_t {
  error,        ///< fails with Fault::error
  cut,          ///< moves only its first half, rounded down to 4096 but not to nothing
  torn,         ///< a write of which only the first half reaches the file; success is reported
  misdirected,  ///< goes to another place in the file, `Fault::distance` away
  bit_flip,     ///< one bit changes on the way
  stuck,        ///< does not complete before it is cancelled
};

/// Requests are counted from 0 in submit order, retries included.
struct Fault {
  FaultKind kind = FaultKind::error;
  uint64_t request = 0;
  uint64_t times = 1;       ///< how many requests from `request` on
  int error = 5;            ///< EIO
  int64_t distance = 4096;  ///< bytes; a place before the file's second page becomes that page
};

/// Faults for tests. What is random is drawn from the seed: which bit flips, delays, order.
struct FaultPlan {
  uint64_t fail_request = UINT64_MAX;
  int error = 5;                ///< EIO
  uint64_t times = UINT64_MAX;  ///< how many requests from fail_request on fail
  /// This request moves only its first half, rounded down to 4096 but not to nothing.
  uint64_t short_request = UINT64_MAX;
  std::vector<Fault> faults{};
  uint64_t seed = 0;
  std::chrono::microseconds latency{0};  ///< completions are held back for up to this long
  bool reorder = false;                  ///< completions come one at a time, in random order
  bool cancellable = true;               ///< whether cancel() ends stuck requests
};
std::unique_ptr<AsyncIo> make_faulty_io(std::unique_ptr<AsyncIo> inner, const FaultPlan& plan);

}  // namespace overspill
