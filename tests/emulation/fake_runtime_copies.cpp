// CUDA's entry points of memory and copies. Memory of a device starts as NaN. What is copied
// asynchronously must be CUDA's: a copy of pageable memory is refused, which CUDA does not do.
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "tests/emulation/fake_runtime_state.h"

using namespace overspill::fake_cuda;

namespace {

constexpr size_t kAlignment = 256;
constexpr size_t kPage = 4096;

size_t padded(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

/// Exactly so many bytes, so that a sanitizer sees the end of it.
std::byte* take(size_t bytes, bool whole_pages) {
  void* memory = nullptr;
  if (posix_memalign(&memory, whole_pages ? kPage : kAlignment,
                     whole_pages ? padded(bytes) : bytes) != 0) {
    return nullptr;
  }
  std::memset(memory, 0xFF, bytes);
  return static_cast<std::byte*>(memory);
}

cudaError_t allocate(void** memory, size_t bytes, Memory::Kind kind) {
  *memory = nullptr;
  if (bytes == 0) return cudaSuccess;
  const Quiet quiet;
  const std::lock_guard lock(world().mutex);
  const bool on_device = kind == Memory::Kind::device;
  uint64_t& used = on_device ? world().devices[current_device()].used : world().pinned;
  const uint64_t limit = on_device ? world().settings.memory_bytes : world().settings.pinned_bytes;
  if (bytes > limit - used) return keep(cudaErrorMemoryAllocation);
  std::byte* const made = take(bytes, on_device && world().settings.protect_memory);
  if (!made) return keep(cudaErrorMemoryAllocation);
  used += bytes;
  world().memory[made] = {bytes, current_device(), kind};
  if (on_device) world().peak = std::max(world().peak, used);
  if (on_device && world().running == 0) protect(false);
  *memory = made;
  return cudaSuccess;
}

/// Whether a stream of the device has work that is not done.
bool busy(int device) {
  return std::ranges::any_of(world().streams, [&](const CUstream_st* stream) {
    return stream->device == device && stream->last && !stream->last->done;
  });
}

cudaError_t give_back(void* memory, Memory::Kind kind, cudaError_t otherwise) {
  if (!memory) return cudaSuccess;
  const Quiet quiet;
  std::unique_lock lock(world().mutex);
  const auto found = world().memory.find(static_cast<std::byte*>(memory));
  if (found == world().memory.end() || found->second.kind != kind) {
    misuse("memory given back that was not taken so");
    return keep(otherwise);
  }
  // A lost device, whose streams cannot be waited for, works no more.
  if (world().devices[found->second.device].sticky != cudaSuccess) {
    world().changed.wait(lock, [&] { return !busy(found->second.device); });
  }
  if (busy(found->second.device)) misuse("memory given back while its device works");
  const bool on_device = kind == Memory::Kind::device;
  (on_device ? world().devices[found->second.device].used : world().pinned) -= found->second.bytes;
  if (on_device && world().settings.protect_memory) {
    ::mprotect(memory, padded(found->second.bytes), PROT_READ | PROT_WRITE);
  }
  world().memory.erase(found);
  if (kind != Memory::Kind::registered) std::free(memory);
  return cudaSuccess;
}

bool fits(FakeCudaMemory where, bool on_device) {
  return where != kFakeCudaPastEnd && (where == kFakeCudaDevice) == on_device;
}

/// Whether the ends lie where the kind of copy says.
bool matches(cudaMemcpyKind kind, FakeCudaMemory to, FakeCudaMemory from) {
  switch (kind) {
    case cudaMemcpyHostToDevice: return fits(to, true) && fits(from, false);
    case cudaMemcpyDeviceToHost: return fits(to, false) && fits(from, true);
    case cudaMemcpyDeviceToDevice: return fits(to, true) && fits(from, true);
    case cudaMemcpyDefault: return to != kFakeCudaPastEnd && from != kFakeCudaPastEnd;
    default: return false;
  }
}

/// Checked at the call, and again when the copy runs.
bool check_copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, bool pageable,
                const char* when) {
  const Quiet quiet;
  const std::lock_guard lock(world().mutex);
  const FakeCudaMemory target = find_memory(to, bytes), source = find_memory(from, bytes);
  if (!matches(kind, target, source)) {
    misuse(std::string("a copy ") + when + " of another kind than its memory, or past its end");
    return false;
  }
  if (!pageable && (target == kFakeCudaPageable || source == kFakeCudaPageable)) {
    misuse(std::string("an asynchronous copy ") + when + " of memory that is not pinned");
    return false;
  }
  return true;
}

cudaError_t put_copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                     CUstream_st* stream, bool pageable, PointPtr& point) {
  if (!stream) return keep(cudaErrorInvalidResourceHandle);
  if (!check_copy(to, from, bytes, kind, pageable, "called")) return keep(cudaErrorInvalidValue);
  point = put(stream, [=] {
    if (!check_copy(to, from, bytes, kind, pageable, "begun")) return;
    note_read(from, bytes);
    note_write(to, bytes);
    std::memmove(to, from, bytes);
  });
  return cudaSuccess;
}

}  // namespace

#define ENTER()                                 \
  do {                                          \
    const cudaError_t status = enter(__func__); \
    if (status != cudaSuccess) return status;   \
  } while (false)

extern "C" {

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  ENTER();
  const Quiet quiet;
  const std::lock_guard lock(world().mutex);
  *total = world().settings.memory_bytes;
  *free = *total - world().devices[current_device()].used;
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** memory, size_t bytes) {
  ENTER();
  return allocate(memory, bytes, Memory::Kind::device);
}

cudaError_t cudaFree(void* memory) {
  const cudaError_t status = enter(__func__);
  const cudaError_t freed = give_back(memory, Memory::Kind::device, cudaErrorInvalidValue);
  return status != cudaSuccess ? status : freed;
}

cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned) {
  ENTER();
  return allocate(memory, bytes, Memory::Kind::host);
}

cudaError_t cudaFreeHost(void* memory) {
  const cudaError_t status = enter(__func__);
  const cudaError_t freed = give_back(memory, Memory::Kind::host, cudaErrorInvalidValue);
  return status != cudaSuccess ? status : freed;
}

cudaError_t cudaHostRegister(void* memory, size_t bytes, unsigned) {
  ENTER();
  const Quiet quiet;
  const std::lock_guard lock(world().mutex);
  auto* const begin = static_cast<std::byte*>(memory);
  if (!begin || bytes == 0) return keep(cudaErrorInvalidValue);
  const auto next = world().memory.lower_bound(begin);
  if (find_memory(begin, 1) != kFakeCudaPageable ||
      (next != world().memory.end() && next->first < begin + bytes)) {
    return keep(cudaErrorHostMemoryAlreadyRegistered);
  }
  if (bytes > world().settings.pinned_bytes - world().pinned) {
    return keep(cudaErrorMemoryAllocation);
  }
  world().pinned += bytes;
  world().memory[begin] = {bytes, current_device(), Memory::Kind::registered};
  return cudaSuccess;
}

cudaError_t cudaHostUnregister(void* memory) {
  const cudaError_t status = enter(__func__);
  const cudaError_t freed =
      give_back(memory, Memory::Kind::registered, cudaErrorHostMemoryNotRegistered);
  return status != cudaSuccess ? status : freed;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* memory) {
  ENTER();
  const Quiet quiet;
  const std::lock_guard lock(world().mutex);
  *attributes = {};
  const FakeCudaMemory where = find_memory(memory, 1);
  attributes->type = where == kFakeCudaDevice   ? cudaMemoryTypeDevice
                     : where == kFakeCudaPinned ? cudaMemoryTypeHost
                                                : cudaMemoryTypeUnregistered;
  if (where == kFakeCudaPageable) return cudaSuccess;
  const auto piece = std::prev(world().memory.upper_bound(static_cast<const std::byte*>(memory)));
  attributes->device = piece->second.device;
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  ENTER();
  PointPtr point;
  const cudaError_t status =
      put_copy(to, from, bytes, kind, resolve(stream, __func__), false, point);
  const Quiet quiet;
  point.reset();
  return status;
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  ENTER();
  PointPtr point;
  const cudaError_t status =
      put_copy(to, from, bytes, kind, resolve(nullptr, __func__), true, point);
  if (status != cudaSuccess) return status;
  wait_for(std::move(point));
  return keep(health(current_device()));
}

cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t stream) {
  ENTER();
  CUstream_st* const own = resolve(stream, __func__);
  if (!own) return keep(cudaErrorInvalidResourceHandle);
  {
    const Quiet quiet;
    const std::lock_guard lock(world().mutex);
    if (find_memory(memory, bytes) != kFakeCudaDevice) {
      misuse("cudaMemsetAsync of memory that is no device's");
      return keep(cudaErrorInvalidValue);
    }
  }
  PointPtr point = put(own, [=] {
    note_write(memory, bytes);
    std::memset(memory, value, bytes);
  });
  const Quiet quiet;
  point.reset();
  return cudaSuccess;
}
}
