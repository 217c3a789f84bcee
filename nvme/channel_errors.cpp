// Errnos of reads and writes, as people need to know them.
#include "nvme/channel_errors.h"

#include <cerrno>

#include "engine/base/error.h"

namespace overspill {

bool may_pass(int error) { return error == EAGAIN || error == EINTR || error == EIO; }

std::string failure_cause(const IoRequest& request, const IoResult& result) {
  if (result.error != 0) return errno_text(result.error);
  if (result.bytes == 0) return request.write ? "nothing was written" : "end of file";
  return request.write ? "short write" : "short read";
}

const char* failure_cure(const IoRequest& request, const IoResult& result) {
  switch (result.error) {
    case 0:
      return result.bytes == 0 && !request.write ? "find what cut the swap file short"
                                                 : "check the drive (dmesg)";
    case ENOSPC:
    case EDQUOT: return "free space there or set offload.nvme_paths to a larger drive";
    case EROFS: return "make the file system writable again (dmesg says why it is not)";
    case ENODEV:
    case ENXIO:
      return "the drive is gone: reconnect or replace it (dmesg), or remove it from "
             "offload.nvme_paths";
    case ESTALE:
      return "the file was revoked by its server: mount it anew, or set offload.nvme_paths to a "
             "local drive";
    case EBADF:
    case EPERM:
    case EACCES:
      return "find what took the access to the file away, or set offload.nvme_paths to another "
             "directory";
    case ENOMEM: return "free memory, or lower offload.io.queue_depth";
    default: return "check the drive (dmesg)";
  }
}

}  // namespace overspill
