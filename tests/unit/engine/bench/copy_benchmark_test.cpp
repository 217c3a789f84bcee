// `overspill bench copy`: which copies are made, of which memory, on which streams; what a machine
// with GPUs gets, and one without.
#include "engine/bench/copy_benchmark.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "engine/base/error.h"
#include "engine/bench/copy_works.h"
#include "tests/emulation/fake_runtime_access.h"

namespace overspill {
namespace {

/// Copies of one size that were put on a stream, or waited for.
struct Counts {
  std::atomic<uint64_t> queued[kDeviceStreams] = {}, pinned = 0, pageable = 0;
};

/// A device that counts what another one does.
class CountingDevice final : public Device {
 public:
  CountingDevice(std::unique_ptr<Device> inner, std::map<uint64_t, Counts>& counts)
      : Device(inner->name(), false), inner_(std::move(inner)), counts_(counts) {
    set_memory({inner_->memory(), inner_->memory_bytes()});
  }
  std::unique_ptr<DeviceEvent> make_event() override { return inner_->make_event(); }
  void record(DeviceEvent& event, DeviceStream stream) override { inner_->record(event, stream); }
  void wait(DeviceStream stream, DeviceEvent& event) override { inner_->wait(stream, event); }
  void launch_host_function(DeviceStream stream, void (*function)(void*), void* argument) override {
    inner_->launch_host_function(stream, function, argument);
  }
  void synchronize(DeviceStream stream) override { inner_->synchronize(stream); }

 private:
  void pin(std::span<std::byte> host) override { pinned_ = inner_->register_host(host); }
  void unpin(std::span<std::byte>) noexcept override { pinned_ = {}; }
  void put_copy(DeviceStream stream, std::byte* to, const std::byte* from,
                uint64_t bytes) override {
    ++at(bytes).queued[static_cast<size_t>(stream)];
    inner_->enqueue_copy(stream, to, from, bytes);
  }
  void copy_now(DeviceStream, std::byte* to, const std::byte* from, uint64_t bytes,
                bool pinned) override {
    ++(pinned ? at(bytes).pinned : at(bytes).pageable);
    in_memory(to, bytes) ? inner_->copy_to_device(to, from, bytes)
                         : inner_->copy_to_host(to, from, bytes);
  }
  Counts& at(uint64_t bytes) {
    const std::lock_guard lock(mutex_);
    return counts_[bytes];
  }

  std::unique_ptr<Device> inner_;
  HostRegistration pinned_;
  std::map<uint64_t, Counts>& counts_;
  std::mutex mutex_;
};

/// Devices of tests that count, each standing for a GPU or the host.
struct Machinery {
  std::map<uint64_t, Counts> counts[2];

  CopyDevices make(uint64_t bytes, size_t devices, bool gpus) {
    CopyDevices result{.devices = {}, .gpu_absence = gpus ? "" : "none in this test"};
    for (uint32_t i = 0; i < devices; ++i) {
      CopyDevice one{
          .device = std::make_unique<CountingDevice>(make_host_device(bytes, false), counts[i])};
      if (gpus) {
        one.gpu = CudaGpu{.index = i,
                          .name = one.device->name(),
                          .memory_bytes = bytes,
                          .capability_major = 9,
                          .capability_minor = 0,
                          .pci = "0000:0" + std::to_string(i) + ":00.0",
                          .peers = {}};
      }
      result.devices.push_back(std::move(one));
    }
    return result;
  }
};

CopyBenchOptions tiny() {
  CopyBenchOptions options;
  options.sizes = {16 * kKiB, 64 * kKiB};
  options.bytes_per_direction = kMiB;
  options.triad_bytes = kMiB;
  options.rounds = {.rounds = 1, .seconds = 1e-9};
  return options;
}

CopyReport run(const CopyBenchOptions& options) {
  const std::atomic<bool> stop = false;
  return run_copy_benchmark(options, stop, [](auto&&...) {});
}

void expect_rates(const CopyReport& report) {
  for (const DeviceCopies& device : report.devices) {
    for (const CopyPoint& p : device.points) {
      for (const double rate : {p.h2d, p.d2h, p.both_h2d, p.both_d2h}) {
        EXPECT_TRUE(std::isfinite(rate) && rate > 0) << p.bytes << (p.pinned ? " pinned" : "");
      }
    }
    EXPECT_GT(device.latency, 0);
  }
}

TEST(CopyBenchmark, AGpusPinnedCopiesAreQueuedAndItsPageableOnesAreNot) {
  Machinery machinery;
  CopyBenchOptions options = tiny();
  options.devices = [&](uint64_t bytes) {
    EXPECT_EQ(bytes, 2 * kMiB);
    return machinery.make(bytes, 1, true);
  };
  const CopyReport report = run(options);
  ASSERT_EQ(report.devices.size(), 1u);
  EXPECT_EQ(report.devices[0].points.size(), 4u);
  expect_rates(report);
  EXPECT_EQ(report.all_h2d, 0);
  EXPECT_EQ(report.devices[0].gpu->pci, "0000:00:00.0");
  for (const uint64_t bytes : options.sizes) {
    SCOPED_TRACE(bytes);
    const Counts& counts = machinery.counts[0].at(bytes);
    // The whole memory alone and beside the other direction, which may go on for longer.
    const uint64_t pass = kMiB / bytes;
    for (const DeviceStream stream : {DeviceStream::h2d, DeviceStream::d2h}) {
      const uint64_t queued = counts.queued[static_cast<size_t>(stream)];
      EXPECT_GE(queued, 2 * pass);
      EXPECT_EQ(queued % pass, 0u);
    }
    EXPECT_EQ(counts.queued[static_cast<size_t>(DeviceStream::compute)].load(), 0u);
    EXPECT_EQ(counts.pinned.load(), 0u);
    EXPECT_GE(counts.pageable.load(), 4u);
  }
  EXPECT_EQ(machinery.counts[0].at(4 * kKiB).pinned.load(), 2u);
}

TEST(CopyBenchmark, TheHostsCopiesAreAllWaitedFor) {
  Machinery machinery;
  CopyBenchOptions options = tiny();
  options.devices = [&](uint64_t bytes) { return machinery.make(bytes, 1, false); };
  const CopyReport report = run(options);
  expect_rates(report);
  EXPECT_FALSE(report.devices[0].gpu);
  EXPECT_EQ(report.gpu_absence, "none in this test");
  for (const uint64_t bytes : options.sizes) {
    const Counts& counts = machinery.counts[0].at(bytes);
    for (const uint64_t queued : counts.queued) EXPECT_EQ(queued, 0u);
    EXPECT_GE(counts.pinned.load(), 4u);
    EXPECT_GE(counts.pageable.load(), 4u);
  }
}

TEST(CopyBenchmark, AllGpusCopyAtOnceFromMemoryOfTheirOwn) {
  Machinery machinery;
  CopyBenchOptions options = tiny();
  options.bytes_per_direction = 64 * kKiB;  // less than both need together
  options.devices = [&](uint64_t bytes) { return machinery.make(bytes, 2, true); };
  const CopyReport report = run(options);
  ASSERT_EQ(report.devices.size(), 2u);
  expect_rates(report);
  for (const double rate :
       {report.all_h2d, report.all_d2h, report.all_both_h2d, report.all_both_d2h}) {
    EXPECT_GT(rate, 0);
  }
  for (const auto& counts : machinery.counts) {
    // Alone, beside the other direction, with the other GPU, and with it in both directions.
    EXPECT_GE(counts.at(64 * kKiB).queued[static_cast<size_t>(DeviceStream::h2d)].load(), 4u);
    EXPECT_GE(counts.at(64 * kKiB).queued[static_cast<size_t>(DeviceStream::d2h)].load(), 4u);
  }
}

TEST(CopyWorks, CycleThroughAllOfTheirMemory) {
  constexpr uint64_t kPiece = 4 * kKiB, kBytes = 4 * kPiece;
  const auto device = make_host_device(2 * kBytes, false);
  std::vector<std::byte> up(kBytes), down(kBytes);
  for (uint64_t i = 0; i < kBytes; ++i) up[i] = static_cast<std::byte>(1 + i / kPiece);
  const CopyMemory memory{device.get(), up.data(), down.data(), kBytes};
  const BenchWork to_device = single_copy(memory, kPiece, CopyDirection::to_device);
  EXPECT_EQ(to_device.amount, static_cast<double>(kPiece));
  for (int i = 0; i < 5; ++i) to_device.run();
  EXPECT_EQ(std::memcmp(device->memory(), up.data(), kBytes), 0);
  const HostRegistration pinned = device->register_host(down);
  const BenchWork to_host = queued_copies(memory, kPiece, CopyDirection::to_host);
  EXPECT_EQ(to_host.amount, static_cast<double>(kBytes));
  std::memcpy(device->memory() + kBytes, up.data(), kBytes);
  to_host.run();
  EXPECT_EQ(down, up);
}

TEST(CopyReports, NameGpusAndSayWhyThereAreNone) {
  CopyReport report{.devices = {{.name = "H100", .points = {{.bytes = 1}}, .nodes = {}},
                                {.name = "H100", .points = {{.bytes = 1}}, .nodes = {}}},
                    .gpu_absence = "",
                    .numa_distances = {}};
  report.devices[0].gpu = {0, "0000:01:00.0", 0};
  report.devices[1].gpu = {1, "0000:02:00.0", -1};
  const BenchSection gpus = copy_section(report);
  EXPECT_NE(gpus.text.find("copies of GPU 0 (H100, NUMA node 0)"), std::string::npos) << gpus.text;
  EXPECT_NE(gpus.text.find("copies of GPU 1 (H100),"), std::string::npos) << gpus.text;
  EXPECT_NE(gpus.text.find("in both directions"), std::string::npos) << gpus.text;
  EXPECT_EQ(gpus.json.at("devices").at(1).at("gpu").at("pci"), "0000:02:00.0");
  report.devices = {{.name = "host", .points = {{.bytes = 1}}, .nodes = {}}};
  report.gpu_absence = "no driver";
  const BenchSection host = copy_section(report);
  EXPECT_NE(host.text.find("the device is the host: no driver"), std::string::npos) << host.text;
  EXPECT_EQ(host.json.at("gpu_absence"), "no driver");
  EXPECT_TRUE(host.json.at("devices").at(0).at("gpu").is_null());
}

class CopyDevicesTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!test::fake_cuda_is_built()) GTEST_SKIP() << "built without CUDA's headers";
    configure({});
  }
  void TearDown() override {
    if (!test::fake_cuda_is_built()) return;
    EXPECT_EQ(test::take_fake_cuda_misuses(), "");
    const FakeCudaLive live = FAKE_CUDA(fake_cuda_live)();
    EXPECT_EQ(live.streams + live.events + live.allocations + live.registrations, 0u);
    configure({});
  }
  static void configure(const FakeCudaSettings& settings) {
    FAKE_CUDA(fake_cuda_configure)(&settings);
  }
};

TEST_F(CopyDevicesTest, AreAllGpus) {
  configure({.devices = 2, .max_delay_us = 50});
  const CopyReport report = run(tiny());
  ASSERT_EQ(report.devices.size(), 2u);
  expect_rates(report);
  EXPECT_EQ(report.gpu_absence, "");
  EXPECT_EQ(report.devices[1].name, "Fake GPU 1");
  EXPECT_EQ(report.devices[1].gpu->index, 1u);
  HardwareProfile profile;
  fill_profile(report, profile);
  EXPECT_EQ(profile.device.count, 2u);
  EXPECT_EQ(profile.link.all_h2d, report.all_h2d);
  EXPECT_LE(profile.link.h2d, report.devices[0].points[2].h2d);
}

TEST_F(CopyDevicesTest, AreTheHostWithoutAGpu) {
  configure({.devices = 0});
  const CopyReport report = run(tiny());
  ASSERT_EQ(report.devices.size(), 1u);
  EXPECT_EQ(report.devices[0].name, "host (discrete)");
  EXPECT_NE(report.gpu_absence.find("CUDA_VISIBLE_DEVICES"), std::string::npos);
  configure({});
  constexpr int kSystemNotReady = 802;
  FAKE_CUDA(fake_cuda_fail_call)("cudaGetDeviceCount", kSystemNotReady, 0);
  const std::string absence = make_copy_devices(4096).gpu_absence;
  EXPECT_NE(absence.find("count the GPUs"), std::string::npos) << absence;
}

TEST_F(CopyDevicesTest, AreRefusedWithoutTheirMemory) {
  configure({.memory_bytes = kMiB});
  EXPECT_THROW(run(tiny()), Error);
}

}  // namespace
}  // namespace overspill
