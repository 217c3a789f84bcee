// Asynchronous reads and writes of a fixed set of open files. An instance is used by one thread.
// Buffers must stay valid until their result is reaped. Requests complete in any order.
#pragma once

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

class AsyncIo {
 public:
  virtual ~AsyncIo() = default;
  /// Name of the backend: "io_uring", "threads".
  virtual const char* name() const = 0;
  /// Most requests that may be in flight.
  virtual uint32_t depth() const = 0;
  /// Starts requests; the caller keeps in-flight requests at or below depth().
  virtual void submit(std::span<const IoRequest> requests) = 0;
  /// Waits for at least one completion when any is in flight; returns how many were stored.
  virtual size_t reap(std::span<IoResult> results) = 0;
};

enum class IoBackend : uint8_t { automatic, io_uring, threads };

struct IoOptions {
  IoBackend backend = IoBackend::automatic;
  uint64_t block_size = 1 << 20;  ///< largest single request, a multiple of 4096
  uint32_t queue_depth = 16;      ///< requests in flight per lane
  /// Tests put a fault-injecting wrapper around the backend here.
  std::function<std::unique_ptr<AsyncIo>(std::unique_ptr<AsyncIo>)> wrap;
};

/// Opens a backend over the files. `automatic` takes io_uring where a real read on it succeeds,
/// else threads; an explicit backend that cannot work is an Error(io) saying why and what to set.
std::unique_ptr<AsyncIo> make_async_io(const IoOptions& options, std::span<const int> files);

/// What `automatic` would choose here, and why: "io_uring", or
/// "threads (io_uring_setup: Operation not permitted; kernel.io_uring_disabled=2)".
std::string describe_io_backend();

/// The ring flags and operations this kernel offers, such as "coop_taskrun defer_taskrun sqpoll; 49
/// operations"; "none" where no ring can be made.
std::string describe_io_uring_features();

/// Seeded faults for tests: the k-th request (from 0) fails with `error`, or is cut short.
struct FaultPlan {
  uint64_t fail_request = UINT64_MAX;
  int error = 5;                ///< EIO
  uint64_t times = UINT64_MAX;  ///< how many requests from fail_request on fail
  /// This request moves only its first half, rounded down to 4096 but not to nothing.
  uint64_t short_request = UINT64_MAX;
};
std::unique_ptr<AsyncIo> make_faulty_io(std::unique_ptr<AsyncIo> inner, const FaultPlan& plan);

/// The backends behind make_async_io, which alone calls these.
namespace io_backend {

struct UringAttempt {
  std::unique_ptr<AsyncIo> io;  ///< null when io_uring does not work here
  const char* step = "";        ///< the call that was refused
  int error = 0;                ///< its errno
};
UringAttempt make_uring_io(uint32_t depth, std::span<const int> files);
std::unique_ptr<AsyncIo> make_thread_pool_io(uint32_t depth, std::span<const int> files);

}  // namespace io_backend

}  // namespace overspill
