// The inside of the fake CUDA runtime: streams as threads, events as points of their work, memory
// by ranges, all under one lock. ThreadSanitizer does not see that lock: only what CUDA itself
// orders (a call before its work, work before what waits for it) counts, so a missing wait is a
// data race.
#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/emulation/fake_runtime.h"

namespace overspill::fake_cuda {

/// Hides the accesses and the synchronisation of a scope from ThreadSanitizer.
class Quiet {
 public:
  Quiet();
  ~Quiet();
  Quiet(const Quiet&) = delete;
  Quiet& operator=(const Quiet&) = delete;
};
/// What happened before publish(key) in one thread happens before what follows receive(key) in
/// another. Outside of Quiet scopes.
void publish(void* key);
void receive(void* key);
/// Accesses for ThreadSanitizer, which may be told to pass over memcpy and memset.
void note_read(const void* begin, size_t bytes);
void note_write(void* begin, size_t bytes);

/// The end of one piece of work.
struct Point {
  bool done = false;
  std::chrono::steady_clock::time_point at{};
};
using PointPtr = std::shared_ptr<Point>;  // copied and dropped in Quiet scopes only

struct Work {
  std::function<void()> run;
  PointPtr point;
};

}  // namespace overspill::fake_cuda

struct CUstream_st {
  CUstream_st(int device, uint64_t seed);
  ~CUstream_st();  // does what is left first

  const int device;
  std::deque<std::unique_ptr<overspill::fake_cuda::Work>> queue{};
  overspill::fake_cuda::PointPtr last{};  ///< of the work put so far; null: none was
  bool closing = false;
  std::mt19937_64 random;
  unsigned slowness;  ///< factor of this stream's delays
  std::thread thread;
};

struct CUevent_st {
  int device;
  bool timed;
  overspill::fake_cuda::PointPtr point;
};

namespace overspill::fake_cuda {

struct Memory {
  size_t bytes;
  int device;
  enum class Kind { device, host, registered } kind;
};

struct DeviceState {
  int sticky = cudaSuccess;
  int breaks_with = cudaSuccess, breaks_after = 0;
  uint64_t used = 0;
  std::unique_ptr<CUstream_st> default_stream;
};

struct World {
  World();
  std::mutex mutex;  // of everything below
  std::condition_variable changed;
  FakeCudaSettings settings;
  std::vector<DeviceState> devices;
  std::set<CUstream_st*> streams;
  std::set<CUevent_st*> events;
  std::map<const std::byte*, Memory> memory;
  uint64_t pinned = 0, peak = 0, streams_made = 0;
  int running = 0;                  ///< pieces of work
  std::deque<std::string> misuses;  ///< texts stay valid when they are taken
  size_t taken_misuses = 0;
  std::string failing_function;
  cudaError_t failing_status = cudaSuccess;
  int failing_skip = 0;
};
World& world();

// With the world's mutex held.
void misuse(const std::string& text);
FakeCudaMemory find_memory(const void* begin, size_t bytes);
void protect(bool accessible);

/// The status that every entry point begins with.
cudaError_t enter(const char* function);
/// Keeps the status as the thread's last error.
cudaError_t keep(cudaError_t status);
cudaError_t take_last_error();
int& current_device();
/// Set while a host function runs.
bool& in_host_function();

/// The stream, or the current device's default stream; null for one that is not there (a misuse).
CUstream_st* resolve(cudaStream_t stream, const char* function);
PointPtr put(CUstream_st* stream, std::function<void()> run);
void wait_for(PointPtr point);
/// The device's sticky error.
cudaError_t health(int device);

}  // namespace overspill::fake_cuda
