// The world of the fake CUDA runtime, and the hooks of tests.
#include "tests/emulation/fake_runtime_state.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

namespace overspill::fake_cuda {
namespace {

uint64_t setting(const char* name, uint64_t otherwise) {
  const char* const text = std::getenv(name);
  return text && *text ? std::strtoull(text, nullptr, 0) : otherwise;
}

FakeCudaLive count_live() {
  FakeCudaLive live{};
  live.streams = world().streams.size();
  live.events = world().events.size();
  live.peak_device_bytes = world().peak;
  for (const auto& [begin, memory] : world().memory) {
    ++(memory.kind == Memory::Kind::registered ? live.registrations : live.allocations);
  }
  for (const DeviceState& device : world().devices) live.device_bytes += device.used;
  return live;
}

bool none_live() {
  const FakeCudaLive live = count_live();
  return live.streams + live.events + live.registrations + live.allocations == 0;
}

/// At the end of the process: what was never given back, and misuses that no test has taken.
struct Report {
  ~Report() {
    const std::lock_guard lock(world().mutex);
    const FakeCudaLive live = count_live();
    const size_t wrong = world().misuses.size() - world().taken_misuses;
    if (none_live() && wrong == 0) return;
    std::fprintf(stderr,
                 "fake CUDA: left at exit: %llu streams, %llu events, %llu allocations, %llu "
                 "registrations; %zu misuses\n",
                 static_cast<unsigned long long>(live.streams),
                 static_cast<unsigned long long>(live.events),
                 static_cast<unsigned long long>(live.allocations),
                 static_cast<unsigned long long>(live.registrations), wrong);
    ::_exit(3);
  }
} report;

thread_local cudaError_t last_error = cudaSuccess;
thread_local int device_of_thread = 0;
thread_local bool host_function = false;

}  // namespace

World::World() {
  settings.devices = static_cast<int>(setting("OVERSPILL_FAKE_CUDA_DEVICES", settings.devices));
  settings.memory_bytes = setting("OVERSPILL_FAKE_CUDA_MEMORY", settings.memory_bytes);
  settings.seed = setting("OVERSPILL_FAKE_CUDA_SEED", settings.seed);
  settings.max_delay_us =
      static_cast<unsigned>(setting("OVERSPILL_FAKE_CUDA_DELAY_US", settings.max_delay_us));
  devices.resize(settings.devices);
}

/// Never destroyed: threads of streams may still run at the end of the process.
World& world() {
  static World* const only = [] {
    const Quiet quiet;
    return new World;
  }();
  return *only;
}

void misuse(const std::string& text) {
  std::fprintf(stderr, "fake CUDA: %s\n", text.c_str());
  world().misuses.push_back(text);
}

FakeCudaMemory find_memory(const void* begin, size_t bytes) {
  const auto* const at = static_cast<const std::byte*>(begin);
  auto found = world().memory.upper_bound(at);
  if (found == world().memory.begin()) return kFakeCudaPageable;
  --found;
  const auto offset = static_cast<size_t>(at - found->first);
  if (offset >= found->second.bytes) return kFakeCudaPageable;
  if (bytes > found->second.bytes - offset) return kFakeCudaPastEnd;
  return found->second.kind == Memory::Kind::device ? kFakeCudaDevice : kFakeCudaPinned;
}

void protect(bool accessible) {
  if (!world().settings.protect_memory) return;
  for (const auto& [begin, memory] : world().memory) {
    if (memory.kind != Memory::Kind::device) continue;
    ::mprotect(const_cast<std::byte*>(begin), memory.bytes,
               accessible ? PROT_READ | PROT_WRITE : PROT_NONE);
  }
}

cudaError_t keep(cudaError_t status) {
  if (status != cudaSuccess && status != cudaErrorNotReady) last_error = status;
  return status;
}

cudaError_t take_last_error() { return std::exchange(last_error, cudaSuccess); }

int& current_device() { return device_of_thread; }

bool& in_host_function() { return host_function; }

cudaError_t health(int device) {
  const Quiet quiet;
  const std::lock_guard lock(world().mutex);
  const auto& devices = world().devices;
  if (device < 0 || static_cast<size_t>(device) >= devices.size()) return cudaErrorInvalidDevice;
  return static_cast<cudaError_t>(devices[device].sticky);
}

cudaError_t enter(const char* function) {
  const Quiet quiet;
  const std::lock_guard lock(world().mutex);
  if (host_function) {
    misuse(std::string(function) + " from a host function");
    return keep(cudaErrorNotPermitted);
  }
  if (world().settings.driver_version < CUDART_VERSION) return keep(cudaErrorInsufficientDriver);
  if (world().devices.empty()) return keep(cudaErrorNoDevice);
  if (static_cast<size_t>(device_of_thread) >= world().devices.size()) {
    return keep(cudaErrorInvalidDevice);
  }
  if (world().failing_status != cudaSuccess && world().failing_function == function &&
      world().failing_skip-- == 0) {
    return keep(std::exchange(world().failing_status, cudaSuccess));
  }
  return keep(static_cast<cudaError_t>(world().devices[device_of_thread].sticky));
}

CUstream_st* resolve(cudaStream_t stream, const char* function) {
  const Quiet quiet;
  const std::lock_guard lock(world().mutex);
  if (stream == nullptr || stream == cudaStreamLegacy) {
    auto& own = world().devices[device_of_thread].default_stream;
    if (!own) own = std::make_unique<CUstream_st>(device_of_thread, world().settings.seed);
    return own.get();
  }
  if (world().streams.contains(stream)) return stream;
  misuse(std::string(function) + " on a stream that is not there");
  return nullptr;
}

}  // namespace overspill::fake_cuda

using namespace overspill::fake_cuda;

extern "C" {

void fake_cuda_configure(const FakeCudaSettings* settings) {
  std::vector<std::unique_ptr<CUstream_st>> ended;  // with what is on them, without the lock
  const Quiet quiet;
  {
    const std::lock_guard lock(world().mutex);
    if (!none_live()) {
      std::fprintf(stderr, "fake CUDA: configured while something is in use\n");
      std::abort();
    }
    for (DeviceState& device : world().devices) ended.push_back(std::move(device.default_stream));
  }
  ended.clear();
  const std::lock_guard lock(world().mutex);
  current_device() = 0;  // the last one of the calling thread may be gone
  world().settings = *settings;
  world().devices.clear();
  world().devices.resize(settings->devices);
  world().peak = world().pinned = world().streams_made = 0;
  world().failing_status = cudaSuccess;
  world().taken_misuses = world().misuses.size();
}

void fake_cuda_enqueue(void* stream, void (*task)(void*), void* argument) {
  if (enter(__func__) != cudaSuccess) return;
  CUstream_st* const own = resolve(static_cast<cudaStream_t>(stream), __func__);
  if (!own) {
    keep(cudaErrorInvalidResourceHandle);
    return;
  }
  if (own->device != device_of_thread) {
    const Quiet quiet;
    const std::lock_guard lock(world().mutex);
    misuse("a kernel launched on a stream of a device that is not current");
    keep(cudaErrorInvalidResourceHandle);
    return;
  }
  PointPtr point = put(own, [=] { task(argument); });
  const Quiet quiet;
  point.reset();
}

void fake_cuda_fail_call(const char* function, int status, int skip) {
  const Quiet quiet;
  const std::lock_guard lock(world().mutex);
  world().failing_function = function;
  world().failing_status = static_cast<cudaError_t>(status);
  world().failing_skip = skip;
}

bool fake_cuda_failure_pending() {
  const Quiet quiet;
  const std::lock_guard lock(world().mutex);
  return world().failing_status != cudaSuccess;
}

void fake_cuda_break_device(int device, int status, int after_work) {
  const Quiet quiet;
  const std::lock_guard lock(world().mutex);
  world().devices[device].breaks_with = status;
  world().devices[device].breaks_after = after_work;
}

const char* fake_cuda_take_misuse() {
  const Quiet quiet;
  const std::lock_guard lock(world().mutex);
  if (world().taken_misuses == world().misuses.size()) return nullptr;
  return world().misuses[world().taken_misuses++].c_str();
}

FakeCudaLive fake_cuda_live() {
  const Quiet quiet;
  const std::lock_guard lock(world().mutex);
  return count_live();
}

FakeCudaMemory fake_cuda_memory(const void* begin, size_t bytes) {
  const Quiet quiet;
  const std::lock_guard lock(world().mutex);
  return find_memory(begin, bytes);
}
}
