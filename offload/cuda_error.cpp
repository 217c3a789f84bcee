// Which CUDA errors end the process's use of a GPU, and the texts of all.
#include "offload/cuda_error.h"

#include "engine/base/error.h"

namespace overspill {

bool cuda_error_is_sticky(cudaError_t status) {
  switch (status) {
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorContained:
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
    case cudaErrorTensorMemoryLeak:
    case cudaErrorMpsClientTerminated:
    case cudaErrorExternalDevice: return true;
    default: return false;
  }
}

namespace {

const char* cure(cudaError_t status) {
  switch (status) {
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorContained:
      return "the GPU or its link is faulty (see `dmesg` and `nvidia-smi -q`); resume from the "
             "last checkpoint on another one";
    case cudaErrorInsufficientDriver: return "update NVIDIA's driver";
    case cudaErrorDevicesUnavailable:
      return "another process has the GPU for itself (see `nvidia-smi`); end it or choose another "
             "GPU with CUDA_VISIBLE_DEVICES";
    case cudaErrorSystemDriverMismatch:
      return "the driver's library and kernel module are of different versions; restart the "
             "machine";
    case cudaErrorSystemNotReady:
      return "the driver is not ready; on systems with NVSwitch start nvidia-fabricmanager";
    default: return nullptr;
  }
}

}  // namespace

void cuda_fail(const CudaLibrary& cuda, cudaError_t status, const std::string& doing) {
  cuda.cudaGetLastError();  // else the next call that asks would see this one's error
  std::string text = fmt::format("cannot {}: {}: {}", doing, cuda.cudaGetErrorName(status),
                                 cuda.cudaGetErrorString(status));
  if (cuda_error_is_sticky(status)) {
    text +=
        "; the cause may be any earlier work on the GPU, which this process cannot use any "
        "more";
    if (!cure(status)) {
      text += ": resume from the last checkpoint, and find the cause with `compute-sanitizer`";
    }
  }
  if (const char* what_to_do = cure(status)) text += fmt::format("; {}", what_to_do);
  throw Error(ErrorCode::io, text);
}

}  // namespace overspill
