// NVIDIA's NCCL, opened at run time, so that one binary starts without it: our own declarations of
// the part of its stable C ABI that is used, as of version 2.14.
#pragma once

#include <climits>
#include <cstddef>

namespace overspill {

struct NcclComm;  // opaque
struct NcclUniqueId {
  char bytes[128];
};

// Numbers of ncclResult_t, ncclDataType_t and ncclRedOp_t.
inline constexpr int kNcclSuccess = 0, kNcclInProgress = 7;
inline constexpr int kNcclUint8 = 1, kNcclFloat32 = 7, kNcclBfloat16 = 9;
inline constexpr int kNcclSum = 0;

/// ncclConfig_t; NCCL reads as much as `size` says and takes its defaults for the rest.
struct NcclConfig {
  size_t size = sizeof(NcclConfig);
  unsigned magic = 0xcafebeef;
  unsigned version = 21400;
  int blocking = 0;
  int cga_cluster_size = INT_MIN;  ///< as if not set
};

/// The functions. `stream` is a cudaStream_t.
struct NcclLibrary {
  int (*get_version)(int* version);
  int (*get_unique_id)(NcclUniqueId* id);
  int (*init)(NcclComm** comm, int ranks, NcclUniqueId id, int rank, NcclConfig* config);
  int (*finalize)(NcclComm* comm);
  int (*destroy)(NcclComm* comm);
  int (*abort)(NcclComm* comm);
  int (*get_async_error)(NcclComm* comm, int* error);
  const char* (*error_text)(int result);
  const char* (*last_error)(NcclComm* comm);
  int (*group_start)();
  int (*group_end)();
  int (*send)(const void* from, size_t count, int type, int peer, NcclComm* comm, void* stream);
  int (*receive)(void* to, size_t count, int type, int peer, NcclComm* comm, void* stream);
  int (*all_gather)(const void* from, void* to, size_t count, int type, NcclComm* comm,
                    void* stream);
  int (*reduce_scatter)(const void* from, void* to, size_t count, int type, int op, NcclComm* comm,
                        void* stream);
  int (*all_reduce)(const void* from, void* to, size_t count, int type, int op, NcclComm* comm,
                    void* stream);
  int (*broadcast)(const void* from, void* to, size_t count, int type, int root, NcclComm* comm,
                   void* stream);
};

/// libnccl.so.2, or the file that the environment's OVERSPILL_NCCL_LIBRARY names. It stays loaded.
/// Throws Error(not_found) saying how to install it, or Error(invalid_config) for a version that is
/// too old.
NcclLibrary open_nccl_library();

}  // namespace overspill
