// A stand-in for NVIDIA's driver library, libcuda.so.1, where there is none: modules load, nothing
// runs. The real cuDNN then plans for GPUs that are described to it.
#include <cstddef>
#include <cstdint>

namespace {

constexpr int kSuccess = 0, kNoDriver = 34;

int give_handle(void** handle) {
  static std::intptr_t next = 0x1000;
  *handle = reinterpret_cast<void*>(next += 16);
  return kSuccess;
}

int give_global(void** address, size_t* bytes) {
  if (bytes) *bytes = 4;
  return give_handle(address);
}

}  // namespace

#define GIVES_HANDLE(name) \
  int name(void** handle) { return give_handle(handle); }
#define GIVES_GLOBAL(name) \
  int name(void** address, size_t* bytes) { return give_global(address, bytes); }
#define SUCCEEDS(name) \
  int name() { return kSuccess; }
#define NEEDS_A_GPU(name) \
  int name() { return kNoDriver; }

// clang-format off
extern "C" {
SUCCEEDS(cuInit)
GIVES_HANDLE(cuLibraryLoadData)
GIVES_HANDLE(cuLibraryGetKernel)
GIVES_HANDLE(cuLibraryGetModule)
GIVES_HANDLE(cuKernelGetFunction)
GIVES_HANDLE(cuModuleLoadData)
GIVES_HANDLE(cuModuleLoadDataEx)
GIVES_HANDLE(cuModuleGetFunction)
GIVES_GLOBAL(cuLibraryGetGlobal)
GIVES_GLOBAL(cuModuleGetGlobal_v2)
SUCCEEDS(cuLibraryUnload)
SUCCEEDS(cuModuleUnload)
SUCCEEDS(cuKernelSetAttribute)
SUCCEEDS(cuFuncSetAttribute)
NEEDS_A_GPU(cuCtxGetCurrent)
NEEDS_A_GPU(cuCtxGetDevice)
NEEDS_A_GPU(cuCtxGetLimit)
NEEDS_A_GPU(cuCtxPopCurrent)
NEEDS_A_GPU(cuCtxPushCurrent)
NEEDS_A_GPU(cuDeviceGet)
NEEDS_A_GPU(cuDeviceGetAttribute)
NEEDS_A_GPU(cuDeviceGetCount)
NEEDS_A_GPU(cuDevicePrimaryCtxRelease)
NEEDS_A_GPU(cuDevicePrimaryCtxReset)
NEEDS_A_GPU(cuDevicePrimaryCtxRetain)
NEEDS_A_GPU(cuDriverGetVersion)
NEEDS_A_GPU(cuFuncGetAttribute)
NEEDS_A_GPU(cuGetErrorName)
NEEDS_A_GPU(cuGetErrorString)
NEEDS_A_GPU(cuGetExportTable)
NEEDS_A_GPU(cuKernelGetAttribute)
NEEDS_A_GPU(cuLaunchCooperativeKernel)
NEEDS_A_GPU(cuLaunchKernel)
NEEDS_A_GPU(cuLaunchKernelEx)
NEEDS_A_GPU(cuLibraryLoadFromFile)
NEEDS_A_GPU(cuLinkAddData)
NEEDS_A_GPU(cuLinkAddData_v2)
NEEDS_A_GPU(cuLinkAddFile_v2)
NEEDS_A_GPU(cuLinkComplete)
NEEDS_A_GPU(cuLinkCreate)
NEEDS_A_GPU(cuLinkCreate_v2)
NEEDS_A_GPU(cuLinkDestroy)
NEEDS_A_GPU(cuMemcpyDtoH_v2)
NEEDS_A_GPU(cuModuleLoadFatBinary)
NEEDS_A_GPU(cuOccupancyMaxActiveBlocksPerMultiprocessor)
NEEDS_A_GPU(cuOccupancyMaxPotentialClusterSize)
NEEDS_A_GPU(cuStreamGetCtx)
NEEDS_A_GPU(cuStreamSynchronize)
NEEDS_A_GPU(cuTensorMapEncodeTiled)
}
// clang-format on
