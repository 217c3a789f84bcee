// GPUs found and refused, and every failure of CUDA as an Error that says what was being done.
#include "offload/cuda_device.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "engine/base/error.h"
#include "engine/base/units.h"
#include "tests/emulation/fake_runtime_access.h"

namespace overspill {
namespace {

// CUDA's numbers of the statuses used here; its headers may be absent.
constexpr int kOperatingSystem = 304, kIllegalAddress = 700, kEcc = 214, kMemoryAllocation = 2,
              kSystemNotReady = 802;

class CudaDeviceTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!test::fake_cuda_is_built()) GTEST_SKIP() << "built without CUDA's headers";
    unsetenv("CUDA_VISIBLE_DEVICES");
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
  static void fail_call(const char* function, int status, int skip = 0) {
    FAKE_CUDA(fake_cuda_fail_call)(function, status, skip);
  }
};

/// The Error of a call.
Error error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  return {ErrorCode::internal, "no error"};
}

void expect_contains(const std::string& text, const std::vector<std::string>& parts) {
  for (const std::string& part : parts) {
    EXPECT_NE(text.find(part), std::string::npos) << "no \"" << part << "\" in: " << text;
  }
}

TEST_F(CudaDeviceTest, ListsGpusWithWhatTheyAre) {
  configure({.devices = 2, .memory_bytes = 3 * kGiB, .capability = 120});
  const CudaGpus found = cuda_devices();
  EXPECT_EQ(found.absence, "");
  ASSERT_EQ(found.gpus.size(), 2u);
  EXPECT_EQ(found.gpus[1], (CudaGpu{.index = 1,
                                    .name = "Fake GPU 1",
                                    .memory_bytes = 3 * kGiB,
                                    .capability_major = 12,
                                    .capability_minor = 0,
                                    .pci = "0000:1b:00.0",
                                    .peers = {0}}));
}

TEST_F(CudaDeviceTest, SaysWhyThereIsNoGpu) {
  configure({.driver_version = 0});
  expect_contains(cuda_devices().absence, {"no NVIDIA driver", "--gpus all"});
  configure({.driver_version = 12040});
  expect_contains(cuda_devices().absence, {"driver is too old", "serves CUDA 12.4", "update"});
  configure({.devices = 0});
  expect_contains(cuda_devices().absence, {"no GPU to this process", "CUDA_VISIBLE_DEVICES"});
  expect_contains(error_of([] { make_cuda_device(0, 0); }).what(), {"no GPU 0", "nvidia-smi"});
  EXPECT_EQ(error_of([] { make_cuda_device(0, 0); }).code(), ErrorCode::not_found);
  EXPECT_EQ(error_of([] { gpu_of_local_rank(0); }).code(), ErrorCode::not_found);

  setenv("OVERSPILL_CUDART", "/nowhere/libcudart.so", 1);
  expect_contains(cuda_devices().absence,
                  {"cannot open CUDA runtime", "/nowhere/libcudart.so", "OVERSPILL_CUDART"});
  setenv("OVERSPILL_CUDART", OVERSPILL_FAKE_NCCL, 1);
  expect_contains(cuda_devices().absence, {"has no function cuda", "no CUDA runtime"});
}

TEST_F(CudaDeviceTest, ARankTakesTheGpuOfItsNumber) {
  configure({.devices = 2});
  EXPECT_EQ(gpu_of_local_rank(0), 0u);
  EXPECT_EQ(gpu_of_local_rank(1), 1u);
  const Error error = error_of([] { gpu_of_local_rank(2); });
  EXPECT_EQ(error.code(), ErrorCode::invalid_config);
  expect_contains(error.what(), {"local rank 2", "shows 2", "at most 2 ranks"});
  setenv("CUDA_VISIBLE_DEVICES", "0,1", 1);
  EXPECT_THROW(gpu_of_local_rank(2), Error);
  configure({.devices = 1});
  setenv("CUDA_VISIBLE_DEVICES", "3", 1);  // the launcher gave the rank its own
  EXPECT_EQ(gpu_of_local_rank(3), 0u);
  unsetenv("CUDA_VISIBLE_DEVICES");
  EXPECT_THROW(gpu_of_local_rank(3), Error);
}

TEST_F(CudaDeviceTest, RefusesMoreMemoryThanIsFree) {
  configure({.memory_bytes = kMiB});
  const auto first = make_cuda_device(512 * kKiB, 0);
  const Error error = error_of([] { make_cuda_device(768 * kKiB, 0); });
  EXPECT_EQ(error.code(), ErrorCode::does_not_fit);
  expect_contains(error.what(), {"device memory", "768.00 KiB", "GPU 0 (Fake GPU 0)",
                                 "16.00 KiB for CUDA's own use", "512.00 KiB free of 1.00 MiB",
                                 "offload.device_memory"});
  EXPECT_EQ(error_of([] { make_cuda_device(500 * kKiB, 0); }).code(), ErrorCode::does_not_fit);
  make_cuda_device(496 * kKiB, 0);
  // Free, but not in one piece.
  fail_call("cudaMalloc", kMemoryAllocation);
  EXPECT_EQ(error_of([] { make_cuda_device(kKiB, 0); }).code(), ErrorCode::does_not_fit);
  EXPECT_EQ(error_of([] { make_cuda_device(0, 1); }).code(), ErrorCode::invalid_config);
}

TEST_F(CudaDeviceTest, RefusesHostMemoryThatCannotBePinned) {
  configure({.pinned_bytes = 4096});
  const auto device = make_cuda_device(4096, 0);
  std::vector<std::byte> host(8192);
  const Error error = error_of([&] { (void)device->register_host(host); });
  EXPECT_EQ(error.code(), ErrorCode::does_not_fit);
  expect_contains(error.what(), {"cannot pin 8.00 KiB", "out of memory", "ulimit -l"});
  const HostRegistration less = device->register_host({host.data(), 4096});
}

TEST_F(CudaDeviceTest, GpusOfOneProcessShareOneRegistration) {
  configure({.devices = 2});
  const auto first = make_cuda_device(4096, 0), second = make_cuda_device(4096, 1);
  std::vector<std::byte> host(4096, std::byte{3});
  const HostRegistration of_first = first->register_host(host);
  const HostRegistration of_second = second->register_host(host);
  second->enqueue_copy(DeviceStream::h2d, second->memory(), host.data(), 4096);
  second->synchronize(DeviceStream::h2d);
  EXPECT_NE(first->native_stream(DeviceStream::compute),
            second->native_stream(DeviceStream::compute));
}

/// Uses a device in every way.
void use_all() {
  std::vector<std::byte> host(4096), pageable(4096);
  const auto device = make_cuda_device(4096, 0);
  const HostRegistration pinned = device->register_host(host);
  const auto event = device->make_event();
  device->enqueue_copy(DeviceStream::h2d, device->memory(), host.data(), 4096);
  device->record(*event, DeviceStream::h2d);
  device->wait(DeviceStream::d2h, *event);
  device->launch_host_function(
      DeviceStream::d2h, [](void*) {}, nullptr);
  while (!event->done()) {
  }
  event->synchronize();
  device->copy_to_host(pageable.data(), device->memory(), 4096);
  device->synchronize(DeviceStream::d2h);
}

TEST_F(CudaDeviceTest, EveryCallThatFailsSaysWhatWasBeingDone) {
  use_all();
  const std::vector<std::pair<const char*, std::string>> calls = {
      {"cudaGetDeviceCount", "count the GPUs"},
      {"cudaGetDeviceProperties", "read properties of GPU 0"},
      {"cudaDeviceGetPCIBusId", "read the PCI address of GPU 0"},
      {"cudaSetDevice", "use GPU 0 (Fake GPU 0)"},
      {"cudaSetDeviceFlags", "start the context on GPU 0"},
      {"cudaDeviceGetStreamPriorityRange", "read the priorities"},
      {"cudaStreamCreateWithPriority", "stream on GPU 0"},
      {"cudaMemGetInfo", "read the free memory"},
      {"cudaMalloc", "allocate 4096 bytes on GPU 0"},
      {"cudaMemsetAsync", "clear 4096 bytes"},
      {"cudaStreamSynchronize", "finish "},
      {"cudaHostRegister", "pin "},
      {"cudaEventCreateWithFlags", "create an event"},
      {"cudaMemcpyAsync", "copy 4096 bytes on the h2d stream of GPU 0"},
      {"cudaEventRecord", "record an event on the h2d stream"},
      {"cudaStreamWaitEvent", "let the d2h stream of GPU 0 (Fake GPU 0) wait"},
      {"cudaLaunchHostFunc", "put a host function on the d2h stream"},
      {"cudaEventQuery", "finish the work before an event"},
      {"cudaEventSynchronize", "finish the work before an event"},
      {"cudaMemcpy", "copy 4096 bytes of pageable memory"}};
  for (const auto& [function, doing] : calls) {
    int times = 0;
    for (;; ++times) {
      fail_call(function, kOperatingSystem, times);
      const Error error = error_of(use_all);
      if (FAKE_CUDA(fake_cuda_failure_pending)()) break;  // not so many calls
      // Destructors go on after an error, so the last calls may be theirs.
      if (std::string(error.what()) == "no error") continue;
      SCOPED_TRACE(std::string(function) + ", call " + std::to_string(times + 1));
      expect_contains(error.what(), {"cannot ", doing, "OS call failed"});
      const FakeCudaLive live = FAKE_CUDA(fake_cuda_live)();
      EXPECT_EQ(live.streams + live.events + live.allocations + live.registrations, 0u);
    }
    EXPECT_GT(times, 0) << function << " is never called";
    configure({});
  }
}

TEST_F(CudaDeviceTest, AStickyErrorIsNamedAndEndsEverything) {
  const auto device = make_cuda_device(4096, 0);
  std::vector<std::byte> host(4096);
  const HostRegistration pinned = device->register_host(host);
  const auto event = device->make_event();
  FAKE_CUDA(fake_cuda_break_device)(0, kIllegalAddress, 0);
  device->enqueue_copy(DeviceStream::h2d, device->memory(), host.data(), 4096);
  const Error error = error_of([&] { device->synchronize(DeviceStream::h2d); });
  EXPECT_EQ(error.code(), ErrorCode::io);
  expect_contains(error.what(), {"finish the work on the h2d stream of GPU 0 (Fake GPU 0)",
                                 "cudaErrorIllegalAddress", "any earlier work", "last checkpoint",
                                 "compute-sanitizer"});
  EXPECT_THROW(device->record(*event, DeviceStream::h2d), Error);
  EXPECT_THROW(event->done(), Error);
  EXPECT_THROW(device->copy_to_host(host.data(), device->memory(), 4096), Error);
}

TEST_F(CudaDeviceTest, FaultyHardwareAndDriversHaveTheirCure) {
  fail_call("cudaSetDeviceFlags", kEcc);
  expect_contains(error_of([] { make_cuda_device(0, 0); }).what(),
                  {"cudaErrorECCUncorrectable", "faulty", "on another one"});
  fail_call("cudaSetDeviceFlags", kSystemNotReady);
  expect_contains(error_of([] { make_cuda_device(0, 0); }).what(), {"nvidia-fabricmanager"});
}

TEST(CudaAbsence, ABuildWithoutCudaSaysSo) {
  if (test::fake_cuda_is_built()) GTEST_SKIP() << "this build has CUDA";
  expect_contains(cuda_devices().absence, {"this build has no CUDA", "OVERSPILL_CUDA"});
  EXPECT_EQ(error_of([] { make_cuda_device(0, 0); }).code(), ErrorCode::not_found);
  EXPECT_EQ(error_of([] { gpu_of_local_rank(0); }).code(), ErrorCode::not_found);
}

}  // namespace
}  // namespace overspill
