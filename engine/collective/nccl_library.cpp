// dlopen and dlsym.
#include "engine/collective/nccl_library.h"

#include <dlfcn.h>

#include <cstdlib>
#include <string>

#include "engine/base/error.h"

namespace overspill {
namespace {

constexpr int kOldestVersion = 21400;  // calls that do not block, and can so be aborted

std::string version_text(int version) {
  return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

std::string last_dl_error() {
  const char* text = dlerror();
  return text ? text : "no reason given";
}

void* open_library(const std::string& path) {
  if (void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) return handle;
  fail(
      ErrorCode::not_found,
      "cannot open NCCL, which GPU ranks talk through: {}; install it (\"pip install "
      "nvidia-nccl-cu12\" or NVIDIA's apt package libnccl2) and put its folder on LD_LIBRARY_PATH, "
      "or set OVERSPILL_NCCL_LIBRARY to the path of libnccl.so.2",
      last_dl_error());
}

}  // namespace

NcclLibrary open_nccl_library() {
  const char* chosen = std::getenv("OVERSPILL_NCCL_LIBRARY");
  const std::string path = chosen && *chosen ? chosen : "libnccl.so.2";
  void* const handle = open_library(path);
  const auto resolve = [&]<class F>(F*& function, const char* name) {
    function = reinterpret_cast<F*>(dlsym(handle, name));
    if (function) return;
    fail(ErrorCode::invalid_config,
         "{} has no function {}: it is no NCCL of version {} or later; install a newer one or set "
         "OVERSPILL_NCCL_LIBRARY to its path",
         path, name, version_text(kOldestVersion));
  };
  NcclLibrary library{};
  resolve(library.get_version, "ncclGetVersion");
  int version = 0;
  if (library.get_version(&version) != kNcclSuccess || version < kOldestVersion) {
    fail(ErrorCode::invalid_config,
         "{} is NCCL {}, version {} or later is needed; install a newer one or set "
         "OVERSPILL_NCCL_LIBRARY to its path",
         path, version_text(version), version_text(kOldestVersion));
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
