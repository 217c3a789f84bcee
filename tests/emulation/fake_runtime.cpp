// CUDA's entry points of devices, errors, streams and events, by their declarations in CUDA's
// header. Stricter than CUDA: only streams that do not block are made, and every handle is checked.
#include <cstdio>
#include <cstring>

#include "tests/emulation/fake_runtime_state.h"

using namespace overspill::fake_cuda;

namespace {

struct ErrorText {
  cudaError_t status;
  const char *name, *text;
};

#define ERROR_TEXT(status, text) \
  { status, #status, text }
const ErrorText kErrorTexts[] = {
    ERROR_TEXT(cudaSuccess, "no error"),
    ERROR_TEXT(cudaErrorInvalidValue, "invalid argument"),
    ERROR_TEXT(cudaErrorMemoryAllocation, "out of memory"),
    ERROR_TEXT(cudaErrorInsufficientDriver, "CUDA driver version is insufficient"),
    ERROR_TEXT(cudaErrorDevicesUnavailable, "CUDA-capable device(s) is/are busy or unavailable"),
    ERROR_TEXT(cudaErrorNoDevice, "no CUDA-capable device is detected"),
    ERROR_TEXT(cudaErrorInvalidDevice, "invalid device ordinal"),
    ERROR_TEXT(cudaErrorECCUncorrectable, "uncorrectable ECC error encountered"),
    ERROR_TEXT(cudaErrorOperatingSystem, "OS call failed or operation not supported on this OS"),
    ERROR_TEXT(cudaErrorInvalidResourceHandle, "invalid resource handle"),
    ERROR_TEXT(cudaErrorNotReady, "device not ready"),
    ERROR_TEXT(cudaErrorIllegalAddress, "an illegal memory access was encountered"),
    ERROR_TEXT(cudaErrorLaunchFailure, "unspecified launch failure"),
    ERROR_TEXT(cudaErrorHostMemoryAlreadyRegistered, "memory is already registered"),
    ERROR_TEXT(cudaErrorHostMemoryNotRegistered, "memory is not registered"),
    ERROR_TEXT(cudaErrorNotPermitted, "operation not permitted"),
    ERROR_TEXT(cudaErrorSystemNotReady, "system not yet initialized")};
#undef ERROR_TEXT

const ErrorText* find_text(cudaError_t status) {
  for (const ErrorText& known : kErrorTexts) {
    if (known.status == status) return &known;
  }
  return nullptr;
}

bool has_device(int device) {
  const Quiet quiet;
  const std::lock_guard lock(world().mutex);
  return device >= 0 && static_cast<size_t>(device) < world().devices.size();
}

/// False (a misuse) when the event is not there.
bool has_event(cudaEvent_t event, const char* function) {
  const Quiet quiet;
  const std::lock_guard lock(world().mutex);
  if (world().events.contains(event)) return true;
  misuse(std::string(function) + " of an event that is not there");
  return false;
}

cudaError_t wait_until_done(PointPtr point, int device) {
  if (point) wait_for(std::move(point));
  return keep(health(device));
}

cudaError_t ask_whether_done(PointPtr point, int device) {
  bool done = true;
  {
    const Quiet quiet;
    const std::lock_guard lock(world().mutex);
    if (point) done = point->done;
  }
  if (point && done) receive(point.get());
  const Quiet quiet;
  point.reset();
  if (!done) return cudaErrorNotReady;
  return keep(health(device));
}

PointPtr last_of(CUstream_st* stream) {
  const std::lock_guard lock(world().mutex);
  return stream->last;
}

PointPtr point_of(cudaEvent_t event) {
  const std::lock_guard lock(world().mutex);
  return event->point;
}

}  // namespace

#define ENTER()                                 \
  do {                                          \
    const cudaError_t status = enter(__func__); \
    if (status != cudaSuccess) return status;   \
  } while (false)

extern "C" {

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) {
  const Quiet quiet;
  const std::lock_guard lock(world().mutex);
  *version = world().settings.driver_version;
  return cudaSuccess;
}

const char* cudaGetErrorName(cudaError_t status) {
  const ErrorText* const known = find_text(status);
  return known ? known->name : "unrecognized error code";
}

const char* cudaGetErrorString(cudaError_t status) {
  const ErrorText* const known = find_text(status);
  return known ? known->text : "unrecognized error code";
}

cudaError_t cudaGetLastError() { return take_last_error(); }

cudaError_t cudaPeekAtLastError() {
  const cudaError_t status = take_last_error();
  return keep(status);
}

cudaError_t cudaGetDeviceCount(int* count) {
  ENTER();
  const Quiet quiet;
  const std::lock_guard lock(world().mutex);
  *count = static_cast<int>(world().devices.size());
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  if (!has_device(device)) return keep(cudaErrorInvalidDevice);
  current_device() = device;
  ENTER();
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  *device = current_device();
  return cudaSuccess;
}

cudaError_t cudaSetDeviceFlags(unsigned) {
  ENTER();
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  ENTER();
  if (!has_device(device)) return keep(cudaErrorInvalidDevice);
  const Quiet quiet;
  const std::lock_guard lock(world().mutex);
  const FakeCudaSettings& settings = world().settings;
  *properties = {};
  std::snprintf(properties->name, sizeof properties->name, "Fake GPU %d", device);
  properties->totalGlobalMem = settings.memory_bytes;
  properties->major = settings.capability / 10;
  properties->minor = settings.capability % 10;
  properties->warpSize = 32;
  properties->multiProcessorCount = 4;
  properties->sharedMemPerBlock = 48 << 10;
  properties->sharedMemPerBlockOptin = 99 << 10;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  ENTER();
  cudaDeviceProp properties;
  const cudaError_t status = cudaGetDeviceProperties(&properties, device);
  if (status != cudaSuccess) return status;
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = properties.major; return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor: *value = properties.minor; return cudaSuccess;
    case cudaDevAttrMultiProcessorCount:
      *value = properties.multiProcessorCount;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = static_cast<int>(properties.sharedMemPerBlockOptin);
      return cudaSuccess;
    default: return keep(cudaErrorInvalidValue);
  }
}

cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
  ENTER();
  if (!has_device(device)) return keep(cudaErrorInvalidDevice);
  std::snprintf(text, static_cast<size_t>(length), "0000:%02X:00.0", 0x1A + device);
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int* reachable, int device, int peer) {
  ENTER();
  if (!has_device(device) || !has_device(peer)) return keep(cudaErrorInvalidDevice);
  *reachable = device != peer;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  ENTER();
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  ENTER();
  const Quiet quiet;
  const std::lock_guard lock(world().mutex);
  if (flags != cudaStreamNonBlocking || priority > 0 || priority < -5) {
    misuse("a stream that waits for the default stream, or with a priority out of range");
    return keep(cudaErrorInvalidValue);
  }
  *stream =
      new CUstream_st(current_device(), world().settings.seed * 1000 + ++world().streams_made);
  world().streams.insert(*stream);
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  const cudaError_t status = enter(__func__);
  if (!stream || !resolve(stream, __func__)) return keep(cudaErrorInvalidResourceHandle);
  {
    const Quiet quiet;
    const std::lock_guard lock(world().mutex);
    const bool lost = world().devices[stream->device].sticky != cudaSuccess;
    if (!lost && stream->last && !stream->last->done) {
      misuse("a stream destroyed before its work is done");
    }
    world().streams.erase(stream);
  }
  delete stream;
  return status;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  ENTER();
  CUstream_st* const own = resolve(stream, __func__);
  if (!own) return keep(cudaErrorInvalidResourceHandle);
  PointPtr last;
  {
    const Quiet quiet;
    last = last_of(own);
  }
  return wait_until_done(std::move(last), own->device);
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  ENTER();
  CUstream_st* const own = resolve(stream, __func__);
  if (!own) return keep(cudaErrorInvalidResourceHandle);
  PointPtr last;
  {
    const Quiet quiet;
    last = last_of(own);
  }
  return ask_whether_done(std::move(last), own->device);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  ENTER();
  CUstream_st* const own = resolve(stream, __func__);
  if (!own || !has_event(event, __func__)) return keep(cudaErrorInvalidResourceHandle);
  PointPtr point;
  {
    const Quiet quiet;
    point = point_of(event);
  }
  if (!point) return cudaSuccess;
  std::function<void()> wait;
  {
    const Quiet quiet;
    wait = [point = std::move(point)] {
      PointPtr kept;
      {
        const Quiet quiet;
        kept = point;
      }
      wait_for(std::move(kept));
    };
  }
  PointPtr own_point = put(own, std::move(wait));
  const Quiet quiet;
  own_point.reset();
  return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* argument) {
  ENTER();
  CUstream_st* const own = resolve(stream, __func__);
  if (!own) return keep(cudaErrorInvalidResourceHandle);
  PointPtr point = put(own, [=] {
    in_host_function() = true;
    function(argument);
    in_host_function() = false;
  });
  const Quiet quiet;
  point.reset();
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  ENTER();
  const Quiet quiet;
  const std::lock_guard lock(world().mutex);
  *event = new CUevent_st{current_device(), (flags & cudaEventDisableTiming) == 0, {}};
  world().events.insert(*event);
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  const cudaError_t status = enter(__func__);
  if (!has_event(event, __func__)) return keep(cudaErrorInvalidResourceHandle);
  const Quiet quiet;
  const std::lock_guard lock(world().mutex);
  world().events.erase(event);
  delete event;
  return status;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  ENTER();
  CUstream_st* const own = resolve(stream, __func__);
  if (!own || !has_event(event, __func__)) return keep(cudaErrorInvalidResourceHandle);
  PointPtr point = put(own, [] {});
  const Quiet quiet;
  const std::lock_guard lock(world().mutex);
  if (own->device != event->device) {
    misuse("an event recorded on another device's stream");
    return keep(cudaErrorInvalidResourceHandle);
  }
  event->point = std::move(point);
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  ENTER();
  if (!has_event(event, __func__)) return keep(cudaErrorInvalidResourceHandle);
  PointPtr point;
  {
    const Quiet quiet;
    point = point_of(event);
  }
  return ask_whether_done(std::move(point), event->device);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  ENTER();
  if (!has_event(event, __func__)) return keep(cudaErrorInvalidResourceHandle);
  PointPtr point;
  {
    const Quiet quiet;
    point = point_of(event);
  }
  return wait_until_done(std::move(point), event->device);
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  ENTER();
  if (!has_event(start, __func__) || !has_event(end, __func__)) {
    return keep(cudaErrorInvalidResourceHandle);
  }
  const Quiet quiet;
  const std::lock_guard lock(world().mutex);
  if (!start->timed || !end->timed || !start->point || !end->point) {
    return keep(cudaErrorInvalidResourceHandle);
  }
  if (!start->point->done || !end->point->done) return cudaErrorNotReady;
  *milliseconds =
      std::chrono::duration<float, std::milli>(end->point->at - start->point->at).count();
  return cudaSuccess;
}
}
