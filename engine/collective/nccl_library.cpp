// Resolves the functions.
#include "engine/collective/nccl_library.h"

#include <string>

#include "engine/base/error.h"
#include "engine/base/shared_library.h"

namespace overspill {
namespace {

constexpr int kOldestVersion = 21400;  // calls that do not block, and can so be aborted

std::string version_text(int version) {
  return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

}  // namespace

NcclLibrary open_nccl_library() {
  const SharedLibrary file({.title = "NCCL",
                            .purpose = "which GPU ranks talk through",
                            .variable = "OVERSPILL_NCCL_LIBRARY",
                            .file = "libnccl.so.2",
                            .packages = "\"pip install nvidia-nccl-cu13\" or NVIDIA's apt package "
                                        "libnccl2",
                            .version = version_text(kOldestVersion) + " or later"});
  const auto resolve = [&](auto*& function, const char* name) {
    file.require().resolve(function, name);
  };
  NcclLibrary library{};
  resolve(library.get_version, "ncclGetVersion");
  int version = 0;
  if (library.get_version(&version) != kNcclSuccess || version < kOldestVersion) {
    file.refuse_version(version_text(version));
  }
  resolve(library.get_unique_id, "ncclGetUniqueId");
  resolve(library.init, "ncclCommInitRankConfig");
  resolve(library.finalize, "ncclCommFinalize");
  resolve(library.destroy, "ncclCommDestroy");
  resolve(library.abort, "ncclCommAbort");
  resolve(library.get_async_error, "ncclCommGetAsyncError");
  resolve(library.error_text, "ncclGetErrorString");
  resolve(library.last_error, "ncclGetLastError");
  resolve(library.group_start, "ncclGroupStart");
  resolve(library.group_end, "ncclGroupEnd");
  resolve(library.send, "ncclSend");
  resolve(library.receive, "ncclRecv");
  resolve(library.all_gather, "ncclAllGather");
  resolve(library.reduce_scatter, "ncclReduceScatter");
  resolve(library.all_reduce, "ncclAllReduce");
  resolve(library.broadcast, "ncclBroadcast");
  return library;
}

}  // namespace overspill
