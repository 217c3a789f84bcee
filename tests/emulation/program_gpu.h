// Another program on a GPU, for tests: memory and two streams of its own.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "offload/cuda_device.h"

namespace overspill::test {

/// The program's own memory and streams on a GPU.
class ProgramGpu {
 public:
  explicit ProgramGpu(uint32_t gpu) : device_(make_cuda_device(kBytes, gpu)) {}

  void* stream(size_t index) {
    return device_->native_stream(index % 2 == 0 ? DeviceStream::compute : DeviceStream::d2h);
  }
  CudaDevice& device() { return *device_; }
  std::byte* take(uint64_t bytes) {
    std::byte* const memory = device_->memory() + used_;
    used_ += (bytes + 255) / 256 * 256;
    EXPECT_LE(used_, kBytes);
    return memory;
  }
  template <class T>
  const void* give(const std::vector<T>& values) {
    const uint64_t bytes = values.size() * sizeof(T);
    std::byte* const memory = take(bytes);
    device_->copy_to_device(memory, reinterpret_cast<const std::byte*>(values.data()), bytes);
    return memory;
  }
  template <class T>
  std::vector<T> get(const void* memory, uint64_t count) {
    std::vector<T> values(count);
    for (const DeviceStream s : {DeviceStream::compute, DeviceStream::d2h}) device_->synchronize(s);
    device_->copy_to_host(reinterpret_cast<std::byte*>(values.data()),
                          static_cast<const std::byte*>(memory), count * sizeof(T));
    return values;
  }
  /// Forgets what was taken, when nothing uses it any more.
  void reset() {
    for (const DeviceStream s : {DeviceStream::compute, DeviceStream::d2h}) device_->synchronize(s);
    used_ = 0;
  }

 private:
  static constexpr uint64_t kBytes = 8 << 20;
  std::unique_ptr<CudaDevice> device_;
  uint64_t used_ = 0;
};

}  // namespace overspill::test
