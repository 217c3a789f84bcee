// What people need to know of a failed request: causes and cures, and a Channel's messages.
#include "nvme/channel_errors.h"

#include <cerrno>
#include <cstdlib>

#include "engine/base/error.h"
#include "engine/base/log.h"
#include "nvme/transfer.h"

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

void Channel::fail_transfer(const Transfer& transfer) const {
  const Failure& failure = *transfer.failure;
  const IoRequest& request = failure.slot.request;
  std::string cause, cure;
  switch (failure.kind) {
    case Failure::Kind::result:
      cause = failure_cause(request, failure.result);
      if (failure.slot.tries > 1) cause += fmt::format(" after {} tries", failure.slot.tries);
      cure = failure_cure(request, failure.result);
      break;
    case Failure::Kind::stuck:
      cause = failure.text;
      cure = "check the drive and its link (dmesg), or raise offload.io.timeout if it is only slow";
      break;
    case Failure::Kind::content:
      cause = failure.text;
      cure = "check the drive and its memory path (dmesg, smartctl -a)";
      break;
    case Failure::Kind::never_written:
      cause = fmt::format("{} is read before it was written", integrity_->name(failure.slot.place));
      cure = "report this bug";
      break;
  }
  // A content error is about all of the request; others are about what is left of it.
  const bool all = failure.kind == Failure::Kind::content;
  const uint32_t bytes = all ? failure.slot.bytes : request.bytes;
  fail(ErrorCode::io,
       "{} {} bytes at offset {:#x} of {}: {} ({} of {} bytes done); {}, then resume from the last "
       "checkpoint",
       request.write ? "write" : "read", bytes, request.offset + request.bytes - bytes,
       volume_.files()[request.file].path().string(), cause, transfer.done_bytes,
       transfer.total_bytes, cure);
}

/// Never returns: whatever the caller did next could reuse memory that the kernel still writes.
void Channel::end_process(const Transfer& transfer) const {
  const IoRequest& request = transfer.failure->slot.request;
  write_log(LogLevel::error,
            fmt::format("{} {} bytes at offset {:#x} of {}: {}, and {} requests could not be "
                        "cancelled, so their memory must not be used again: this process ends now. "
                        "Check the drive and its link (dmesg), then resume from the last "
                        "checkpoint; the next run reclaims the swap files",
                        request.write ? "write" : "read", request.bytes, request.offset,
                        volume_.files()[request.file].path().string(), transfer.failure->text,
                        in_flight_));
  std::_Exit(1);
}

}  // namespace overspill
