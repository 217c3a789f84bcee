// Memory from front to back, and launches in batches.
#include "bench/gpu/gpu_bench.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>

#include "engine/base/dtype.h"
#include "engine/base/error.h"
#include "engine/base/random.h"
#include "engine/base/units.h"

namespace overspill {
namespace {

constexpr uint64_t kAlignment = 4096;
constexpr double kBatchSeconds = 2e-3;  // waiting for an event takes microseconds
constexpr double kMostLaunches = 200;
constexpr uint64_t kPatternValues = uint64_t{1} << 20;

uint64_t aligned(uint64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

GpuBench::GpuBench(CudaDevice& device, const RoundOptions& rounds, const BenchProgress& progress)
    : device_(device),
      stream_(static_cast<cudaStream_t>(device.native_stream(DeviceStream::compute))),
      rounds_(rounds),
      progress_(progress),
      last_(device.make_event()) {}

bool GpuBench::fits(uint64_t bytes) const {
  return aligned(bytes) <= device_.memory_bytes() - used_;
}

std::byte* GpuBench::take(uint64_t bytes) {
  if (!fits(bytes)) {
    fail(ErrorCode::does_not_fit,
         "the benchmark needs {} more of the GPU's memory, and has {} left", format_bytes(bytes),
         format_bytes(device_.memory_bytes() - used_));
  }
  std::byte* const memory = device_.memory() + used_;
  used_ += aligned(bytes);
  return memory;
}

void GpuBench::upload(void* device, const void* host, uint64_t bytes) {
  device_.copy_to_device(static_cast<std::byte*>(device), static_cast<const std::byte*>(host),
                         bytes);
}

void GpuBench::fill_bf16(void* device, uint64_t count) {
  auto* const memory = static_cast<std::byte*>(device);
  uint64_t filled = std::min(count, kPatternValues);
  std::vector<uint16_t> pattern(filled);
  for (uint64_t i = 0; i < filled; ++i) pattern[i] = float_to_bf16(random_normal(1, i));
  upload(memory, pattern.data(), filled * sizeof(uint16_t));
  while (filled < count) {  // doubled
    const uint64_t more = std::min(filled, count - filled);
    device_.enqueue_copy(DeviceStream::compute, memory + filled * sizeof(uint16_t), memory,
                         more * sizeof(uint16_t));
    filled += more;
  }
  device_.synchronize(DeviceStream::compute);
}

void GpuBench::add(const std::string& name, const char* unit, double amount,
                   const std::function<void()>& launch) {
  const auto batch = [this, launch](double launches) {
    for (double i = 0; i < launches; ++i) launch();
    device_.record(*last_, DeviceStream::compute);
    last_->synchronize();
  };
  batch(1);  // loads the kernel
  const auto start = std::chrono::steady_clock::now();
  batch(1);
  const std::chrono::duration<double> once = std::chrono::steady_clock::now() - start;
  const double launches = std::clamp(std::ceil(kBatchSeconds / once.count()), 1.0, kMostLaunches);
  tasks_.push_back(
      {.name = name, .unit = unit, .works = {{amount * launches, [=] { batch(launches); }}}});
}

std::vector<double> GpuBench::measure() {
  BenchRounds rounds(rounds_, tasks_.size(), stop_, progress_);
  std::vector<double> rates;
  for (const auto& works : rounds.measure(tasks_)) rates.push_back(works[0]);
  tasks_.clear();
  return rates;
}

std::string tera(double rate) { return fmt::format("{:.3g}", rate * 1e-12); }

}  // namespace overspill
