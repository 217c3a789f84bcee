// The backends behind make_async_io, which alone calls these, and the probe they share.
// Private to nvme.
#pragma once

#include <cstdlib>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "nvme/async_io.h"

namespace overspill::io_backend {

struct Attempt {
  std::unique_ptr<AsyncIo> io;  ///< null when the backend does not work here
  const char* step = "";        ///< the call that was refused
  int error = 0;                ///< its errno
  /// Errno for which buffers could not be registered; the backend works without.
  int buffers_error = 0;
};
/// `polled` wants all_can_be_polled().
Attempt make_uring_io(uint32_t depth, std::span<const int> files,
                      std::span<const std::span<std::byte>> buffers, bool polled);
Attempt make_libaio_io(uint32_t depth, std::span<const int> files);
std::unique_ptr<AsyncIo> make_thread_pool_io(uint32_t depth, std::span<const int> files);
std::unique_ptr<AsyncIo> make_memory_io(uint32_t depth, std::span<const int> files,
                                        std::shared_ptr<MemoryFiles> contents);

struct FreedProbePage {
  void operator()(std::byte* memory) const { std::free(memory); }
};
using ProbePage = std::unique_ptr<std::byte, FreedProbePage>;  // aligned
inline constexpr uint32_t kProbeBytes = 4096;
ProbePage make_probe_page();

struct ProbeFailure {
  const char* step = "";
  int error = 0;  ///< 0: every path works, or fails on any backend
};
/// Reads each file's first page through `io`, and writes the same bytes back where the file is open
/// for both: a backend that sets up but cannot move bytes is as useless as none.
ProbeFailure probe_io(AsyncIo& io, std::span<const int> files, std::byte* page);

/// Whether every file is open with O_DIRECT.
bool all_direct(std::span<const int> files);
/// Whether every file is a raw device, open with O_DIRECT, with poll queues and taking requests of
/// so many bytes in one piece: Linux retries a polled request that must be split for ever.
bool all_can_be_polled(std::span<const int> files, uint64_t bytes);
/// Names of this machine's drives with poll queues, sorted.
std::vector<std::string> drives_with_poll_queues();

}  // namespace overspill::io_backend
