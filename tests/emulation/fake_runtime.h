// What tests tell the fake CUDA runtime beside CUDA's own calls: what machine it plays, what fails,
// and what has been done wrong. Linked, or found by dlsym. Thread-safe except for configure().
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

/// Before any setting the environment's OVERSPILL_FAKE_CUDA_DEVICES, _MEMORY (bytes), _SEED and
/// _DELAY_US hold, then these values.
struct FakeCudaSettings {
  int devices = 1;
  uint64_t memory_bytes = uint64_t{1} << 30;  ///< of each device
  int capability = 90;
  uint64_t seed = 1;
  /// Work waits a random time below this before it starts, and some streams are slower than others.
  unsigned max_delay_us = 0;
  int driver_version = 13000;  ///< 0: no driver
  /// Bytes of host memory that can be pinned.
  uint64_t pinned_bytes = UINT64_MAX;
  /// The host's threads get a segmentation fault from device memory while no work runs.
  bool protect_memory = false;
};

/// Forgets failures and misuses too. Aborts while streams, events or memory of CUDA are left.
void fake_cuda_configure(const FakeCudaSettings* settings);

/// Puts task(argument) on a stream, as a kernel's launch does; null: the default stream.
void fake_cuda_enqueue(void* stream, void (*task)(void*), void* argument);

/// The entry point ("cudaMalloc") returns the status once and does nothing else, after `skip` calls
/// that work.
void fake_cuda_fail_call(const char* function, int status, int skip);
/// Whether that failure is still to come.
bool fake_cuda_failure_pending();
/// The device is lost after so many more pieces of work: none is done any more, every call says so.
void fake_cuda_break_device(int device, int status, int after_work);

/// The oldest misuse that has not been taken, null when there is none. What a program does wrong
/// without being told by a status, or with one that it should never see. The text stays valid.
const char* fake_cuda_take_misuse();

struct FakeCudaLive {
  uint64_t streams, events, allocations, registrations;
  uint64_t device_bytes, peak_device_bytes;  ///< of all devices
};
FakeCudaLive fake_cuda_live();

enum FakeCudaMemory { kFakeCudaPageable, kFakeCudaPinned, kFakeCudaDevice, kFakeCudaPastEnd };
/// Where the bytes lie; past end: they begin in a piece of CUDA's memory and leave it.
FakeCudaMemory fake_cuda_memory(const void* begin, size_t bytes);
}
