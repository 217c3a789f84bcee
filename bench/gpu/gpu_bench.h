// Work on a GPU's compute stream, repeated and timed by the host's clock around an event, and the
// GPU's memory for it. One thread.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/bench/bench_rounds.h"
#include "offload/cuda_device.h"

namespace overspill {

class GpuBench {
 public:
  /// The device's memory is all the benchmark's.
  GpuBench(CudaDevice& device, const RoundOptions& rounds, const BenchProgress& progress);

  CudaDevice& device() const { return device_; }
  cudaStream_t stream() const { return stream_; }

  /// Takes no memory, until the next array() takes the first.
  void reset() { used_ = 0; }
  bool fits(uint64_t bytes) const;
  /// Aligned to 4096 bytes; holds anything. Throws Error(does_not_fit).
  template <class T>
  T* array(uint64_t count) {
    return reinterpret_cast<T*>(take(count * sizeof(T)));
  }
  void upload(void* device, const void* host, uint64_t bytes);
  /// Numbers as of weights and activations: a processor's power, and so its clock, depends on them.
  void fill_bf16(void* device, uint64_t count);

  /// Something to measure: `launch` enqueues `amount` (bytes or FLOPs) on the stream. Runs it once
  /// to see how long it takes.
  void add(const std::string& name, const char* unit, double amount,
           const std::function<void()>& launch);
  /// Amounts per second of all that was added since the last call, in that order.
  std::vector<double> measure();

 private:
  std::byte* take(uint64_t bytes);

  CudaDevice& device_;
  cudaStream_t stream_;
  RoundOptions rounds_;
  const BenchProgress& progress_;
  std::shared_ptr<DeviceEvent> last_;
  uint64_t used_ = 0;
  std::vector<BenchTask> tasks_;
  const std::atomic<bool> stop_{false};
};

/// FLOPs or bytes per second in the unit of a table, three digits: "1.23" for 1.23e12.
std::string tera(double rate);

}  // namespace overspill
