// The probe of a backend on every file it will use.
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

#include "engine/base/error.h"
#include "nvme/io_backends.h"

namespace overspill::io_backend {
namespace {

IoResult run(AsyncIo& io, const IoRequest& request) {
  io.submit(std::span(&request, 1));
  IoResult result{};
  CHECK(io.reap(std::span(&result, 1)) == 1);
  return result;
}

}  // namespace

ProbePage make_probe_page() {
  return ProbePage(static_cast<std::byte*>(std::aligned_alloc(kProbeBytes, kProbeBytes)));
}

ProbeFailure probe_io(AsyncIo& io, std::span<const int> files, std::byte* page) {
  for (uint32_t i = 0; i < files.size(); ++i) {
    IoRequest request{
        .file = i, .offset = 0, .memory = page, .bytes = kProbeBytes, .write = false, .tag = i};
    const IoResult read = run(io, request);
    if (read.error != 0) {
      if (pread(files[i], page, kProbeBytes, 0) >= 0) return {"a read", read.error};
      continue;
    }
    const int flags = fcntl(files[i], F_GETFL);
    if (read.bytes < kProbeBytes || flags < 0 || (flags & O_ACCMODE) != O_RDWR) continue;
    request.write = true;
    const IoResult written = run(io, request);
    if (written.error != 0 && pwrite(files[i], page, kProbeBytes, 0) >= 0) {
      return {"a write", written.error};
    }
  }
  return {};
}

}  // namespace overspill::io_backend
