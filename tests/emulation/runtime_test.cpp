// The fake CUDA runtime itself: order by events alone, asynchrony, what it refuses and reports.
// Where it is as strict as CUDA or stricter, engine tests on it mean something.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstring>
#include <future>
#include <thread>
#include <utility>
#include <vector>

#include "tests/emulation/fake_runtime.h"

namespace {

class FakeRuntime : public testing::TestWithParam<uint64_t> {
 protected:
  void SetUp() override {
    GTEST_FLAG_SET(death_test_style, "threadsafe");
    configure({.devices = 2, .seed = GetParam(), .max_delay_us = 200});
    ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
  }
  void TearDown() override {
    EXPECT_EQ(take_misuse(), "");
    const FakeCudaLive live = fake_cuda_live();
    EXPECT_EQ(live.streams + live.events + live.allocations + live.registrations, 0u);
    cudaGetLastError();
  }
  static void configure(const FakeCudaSettings& settings) { fake_cuda_configure(&settings); }
  static std::string take_misuse() {
    const char* const text = fake_cuda_take_misuse();
    return text ? text : "";
  }
};
INSTANTIATE_TEST_SUITE_P(Seeds, FakeRuntime, testing::Values(1, 2, 3));

struct Stream {
  Stream() {
    EXPECT_EQ(cudaStreamCreateWithPriority(&handle, cudaStreamNonBlocking, 0), cudaSuccess);
  }
  ~Stream() {
    cudaStreamSynchronize(handle);
    cudaStreamDestroy(handle);
  }
  cudaStream_t handle = nullptr;
};

struct Event {
  explicit Event(unsigned flags = cudaEventDisableTiming) {
    EXPECT_EQ(cudaEventCreateWithFlags(&handle, flags), cudaSuccess);
  }
  ~Event() { cudaEventDestroy(handle); }
  cudaEvent_t handle = nullptr;
};

struct DeviceMemory {
  explicit DeviceMemory(size_t bytes) {
    void* made = nullptr;
    EXPECT_EQ(cudaMalloc(&made, bytes), cudaSuccess);
    begin = static_cast<unsigned char*>(made);
  }
  ~DeviceMemory() { cudaFree(begin); }
  unsigned char* begin;
};

struct PinnedMemory {
  explicit PinnedMemory(size_t bytes) {
    void* made = nullptr;
    EXPECT_EQ(cudaHostAlloc(&made, bytes, cudaHostAllocPortable), cudaSuccess);
    begin = static_cast<unsigned char*>(made);
    std::memset(begin, 0, bytes);
  }
  ~PinnedMemory() { cudaFreeHost(begin); }
  unsigned char* begin;
};

/// Holds a stream until it is opened.
class Gate {
 public:
  explicit Gate(Stream& stream) {
    EXPECT_EQ(cudaLaunchHostFunc(stream.handle, wait, this), cudaSuccess);
  }
  ~Gate() {
    open();
    passed_.get_future().wait();
  }
  void open() {
    if (!std::exchange(is_open_, true)) opened_.set_value();
  }

 private:
  static void wait(void* argument) {
    auto& gate = *static_cast<Gate*>(argument);
    gate.opened_.get_future().wait();
    gate.passed_.set_value();
  }
  bool is_open_ = false;
  std::promise<void> opened_, passed_;
};

TEST_P(FakeRuntime, AStreamWorksInOrder) {
  const DeviceMemory device(256);
  const PinnedMemory host(256);
  Stream stream;
  for (int i = 1; i <= 20; ++i) cudaMemsetAsync(device.begin, i, 256, stream.handle);
  EXPECT_EQ(cudaMemcpyAsync(host.begin, device.begin, 256, cudaMemcpyDeviceToHost, stream.handle),
            cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(stream.handle), cudaSuccess);
  EXPECT_EQ(host.begin[255], 20);
}

TEST_P(FakeRuntime, OnlyEventsOrderStreams) {
  const DeviceMemory device(64);
  Stream first, second;
  Event reached, late;
  Gate gate(first);
  cudaEventRecord(reached.handle, first.handle);
  cudaMemsetAsync(device.begin, 1, 64, second.handle);
  EXPECT_EQ(cudaStreamSynchronize(second.handle), cudaSuccess);  // does not wait for the first
  cudaStreamWaitEvent(second.handle, reached.handle, 0);
  cudaEventRecord(late.handle, second.handle);
  EXPECT_EQ(cudaEventQuery(late.handle), cudaErrorNotReady);
  EXPECT_EQ(cudaStreamQuery(second.handle), cudaErrorNotReady);
  gate.open();
  EXPECT_EQ(cudaEventSynchronize(late.handle), cudaSuccess);
  EXPECT_EQ(cudaEventQuery(reached.handle), cudaSuccess);
}

TEST_P(FakeRuntime, AWaitIsForTheRecordBeforeIt) {
  Stream first, second;
  Event event;
  EXPECT_EQ(cudaStreamWaitEvent(second.handle, event.handle, 0), cudaSuccess);  // never recorded
  cudaEventRecord(event.handle, first.handle);
  cudaStreamWaitEvent(second.handle, event.handle, 0);
  Gate gate(first);
  cudaEventRecord(event.handle, first.handle);
  EXPECT_EQ(cudaStreamSynchronize(second.handle), cudaSuccess);
  EXPECT_EQ(cudaEventQuery(event.handle), cudaErrorNotReady);
}

TEST_P(FakeRuntime, CopiesAreOfCudasMemoryAndWithinIt) {
  const DeviceMemory device(64);
  const PinnedMemory pinned(64);
  std::vector<unsigned char> pageable(64), registered(64);
  Stream stream;
  const auto copy = [&](void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
    return cudaMemcpyAsync(to, from, bytes, kind, stream.handle);
  };
  EXPECT_EQ(copy(device.begin, pageable.data(), 64, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
  EXPECT_NE(take_misuse().find("not pinned"), std::string::npos);
  EXPECT_EQ(copy(device.begin, pinned.begin, 65, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
  EXPECT_NE(take_misuse().find("past its end"), std::string::npos);
  EXPECT_EQ(copy(device.begin, pinned.begin, 64, cudaMemcpyDeviceToHost), cudaErrorInvalidValue);
  EXPECT_NE(take_misuse().find("another kind"), std::string::npos);
  EXPECT_EQ(copy(device.begin, pinned.begin, 64, cudaMemcpyHostToDevice), cudaSuccess);

  ASSERT_EQ(cudaHostRegister(registered.data(), 64, cudaHostRegisterPortable), cudaSuccess);
  EXPECT_EQ(cudaHostRegister(registered.data() + 8, 64, cudaHostRegisterPortable),
            cudaErrorHostMemoryAlreadyRegistered);
  EXPECT_EQ(copy(registered.data(), device.begin, 64, cudaMemcpyDefault), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(stream.handle), cudaSuccess);
  EXPECT_EQ(cudaHostUnregister(registered.data()), cudaSuccess);
  EXPECT_EQ(cudaMemcpy(pageable.data(), device.begin, 64, cudaMemcpyDeviceToHost), cudaSuccess);
}

TEST_P(FakeRuntime, ReportsMemoryGivenBackUnderWork) {
  std::vector<unsigned char> host(64);
  const DeviceMemory device(64);
  Stream stream;
  ASSERT_EQ(cudaHostRegister(host.data(), 64, 0), cudaSuccess);
  {
    Gate gate(stream);
    cudaMemcpyAsync(device.begin, host.data(), 64, cudaMemcpyHostToDevice, stream.handle);
    EXPECT_EQ(cudaHostUnregister(host.data()), cudaSuccess);
  }
  cudaStreamSynchronize(stream.handle);
  EXPECT_NE(take_misuse().find("while its device works"), std::string::npos);
  EXPECT_NE(take_misuse().find("begun of memory that is not pinned"), std::string::npos);
}

TEST_P(FakeRuntime, MemoryHasALimitAndStartsAsNaN) {
  configure({.memory_bytes = 1000, .pinned_bytes = 100});
  size_t free = 0, total = 0;
  void* more = nullptr;
  {
    const DeviceMemory device(600);
    ASSERT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
    EXPECT_EQ(free, 400u);
    EXPECT_EQ(total, 1000u);
    EXPECT_EQ(cudaMalloc(&more, 401), cudaErrorMemoryAllocation);
    EXPECT_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
    float value = 0;
    cudaMemcpy(&value, device.begin, sizeof value, cudaMemcpyDeviceToHost);
    EXPECT_NE(value, value);
  }
  EXPECT_EQ(fake_cuda_live().peak_device_bytes, 600u);
  EXPECT_EQ(cudaHostAlloc(&more, 101, 0), cudaErrorMemoryAllocation);
}

TEST_P(FakeRuntime, AHostFunctionMayNotCallCuda) {
  Stream stream;
  cudaError_t status = cudaSuccess;
  cudaLaunchHostFunc(
      stream.handle,
      [](void* result) { *static_cast<cudaError_t*>(result) = cudaStreamQuery(nullptr); }, &status);
  EXPECT_EQ(cudaStreamSynchronize(stream.handle), cudaSuccess);
  EXPECT_EQ(status, cudaErrorNotPermitted);
  EXPECT_NE(take_misuse().find("from a host function"), std::string::npos);
}

TEST_P(FakeRuntime, ABrokenDeviceSaysSoEverywhereAndWorksNoMore) {
  Stream stream, other;
  Event event;
  int ran = 0;
  const auto count = [](void* argument) { ++*static_cast<int*>(argument); };
  fake_cuda_break_device(0, cudaErrorIllegalAddress, 2);
  for (int i = 0; i < 5; ++i) fake_cuda_enqueue(stream.handle, count, &ran);
  EXPECT_EQ(cudaStreamSynchronize(stream.handle), cudaErrorIllegalAddress);
  EXPECT_EQ(ran, 2);
  EXPECT_EQ(cudaEventRecord(event.handle, other.handle), cudaErrorIllegalAddress);
  EXPECT_EQ(cudaSetDevice(0), cudaErrorIllegalAddress);
  EXPECT_EQ(cudaSetDevice(1), cudaSuccess);  // the other GPU lives
  cudaSetDevice(0);
}

TEST_P(FakeRuntime, ACallFailsOnceOnDemand) {
  fake_cuda_fail_call("cudaStreamQuery", cudaErrorOperatingSystem, 1);
  EXPECT_EQ(cudaStreamQuery(nullptr), cudaSuccess);
  EXPECT_TRUE(fake_cuda_failure_pending());
  EXPECT_EQ(cudaStreamQuery(nullptr), cudaErrorOperatingSystem);
  EXPECT_FALSE(fake_cuda_failure_pending());
  EXPECT_EQ(cudaStreamQuery(nullptr), cudaSuccess);
  EXPECT_STREQ(cudaGetErrorName(cudaErrorOperatingSystem), "cudaErrorOperatingSystem");
}

TEST_P(FakeRuntime, HandlesThatAreGoneAreRefused) {
  cudaStream_t gone = nullptr;
  {
    Stream stream;
    gone = stream.handle;
    cudaStream_t blocking = nullptr;
    EXPECT_EQ(cudaStreamCreateWithPriority(&blocking, cudaStreamDefault, 0), cudaErrorInvalidValue);
    EXPECT_NE(take_misuse(), "");
  }
  EXPECT_EQ(cudaStreamQuery(gone), cudaErrorInvalidResourceHandle);
  EXPECT_NE(take_misuse().find("not there"), std::string::npos);
  {
    Stream stream;
    cudaSetDevice(1);
    Event event;
    EXPECT_EQ(cudaEventRecord(event.handle, stream.handle), cudaErrorInvalidResourceHandle);
    EXPECT_NE(take_misuse().find("another device"), std::string::npos);
    fake_cuda_enqueue(
        stream.handle, [](void*) { FAIL(); }, nullptr);
    EXPECT_NE(take_misuse().find("not current"), std::string::npos);
    cudaSetDevice(0);
  }
}

TEST_P(FakeRuntime, TimesWorkBetweenEvents) {
  Stream stream;
  Event begin(cudaEventDefault), end(cudaEventDefault), untimed;
  cudaEventRecord(begin.handle, stream.handle);
  fake_cuda_enqueue(
      stream.handle, [](void*) { std::this_thread::sleep_for(std::chrono::milliseconds(5)); },
      nullptr);
  cudaEventRecord(end.handle, stream.handle);
  cudaEventRecord(untimed.handle, stream.handle);
  cudaEventSynchronize(untimed.handle);
  float milliseconds = 0;
  EXPECT_EQ(cudaEventElapsedTime(&milliseconds, begin.handle, end.handle), cudaSuccess);
  EXPECT_GE(milliseconds, 5.0f);
  EXPECT_EQ(cudaEventElapsedTime(&milliseconds, begin.handle, untimed.handle),
            cudaErrorInvalidResourceHandle);
}

TEST_P(FakeRuntime, WithoutADriverOrDeviceTheCountIsLeftAlone) {
  int count = 77;
  configure({.driver_version = 12040});
  EXPECT_EQ(cudaGetDeviceCount(&count), cudaErrorInsufficientDriver);
  configure({.devices = 0});
  EXPECT_EQ(cudaGetDeviceCount(&count), cudaErrorNoDevice);
  EXPECT_EQ(count, 77);
}

/// Two streams pass a page on; whether it arrived whole.
bool passes_on(uint64_t seed, bool with_wait) {
  const FakeCudaSettings settings{.seed = seed, .max_delay_us = 500};
  fake_cuda_configure(&settings);
  const DeviceMemory device(4096);
  const PinnedMemory host(4096);
  Stream first, second;
  Event written;
  cudaMemsetAsync(device.begin, 7, 4096, first.handle);
  cudaEventRecord(written.handle, first.handle);
  if (with_wait) cudaStreamWaitEvent(second.handle, written.handle, 0);
  cudaMemcpyAsync(host.begin, device.begin, 4096, cudaMemcpyDeviceToHost, second.handle);
  cudaStreamSynchronize(second.handle);
  return host.begin[0] == 7 && host.begin[4095] == 7;
}

TEST(FakeRuntimeMutants, AMissingWaitGivesWrongBytesWithSomeSeeds) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "ThreadSanitizer would report the race";
#endif
  int wrong = 0;
  for (uint64_t seed = 1; seed <= 10; ++seed) {
    EXPECT_TRUE(passes_on(seed, true));
    wrong += !passes_on(seed, false);
  }
  EXPECT_GT(wrong, 0);
}

// Also where the bytes come out right: only the wait orders the streams for ThreadSanitizer.
TEST(FakeRuntimeMutants, AMissingWaitIsADataRace) {
#if !defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "built without ThreadSanitizer";
#endif
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_TRUE(passes_on(1, true));
  EXPECT_DEATH(
      {
        for (uint64_t seed = 1; seed <= 3; ++seed) passes_on(seed, false);
        std::exit(0);
      },
      "data race");
}

TEST(FakeRuntimeDeathTest, TheHostCannotTouchProtectedDeviceMemory) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const FakeCudaSettings settings{.protect_memory = true};
  fake_cuda_configure(&settings);
  {
    const DeviceMemory device(8192);
    EXPECT_DEATH(device.begin[0] = 1, "");
    Stream stream;
    fake_cuda_enqueue(
        stream.handle, [](void* memory) { static_cast<unsigned char*>(memory)[0] = 7; },
        device.begin);
    unsigned char value = 0;
    cudaStreamSynchronize(stream.handle);
    cudaMemcpy(&value, device.begin, 1, cudaMemcpyDeviceToHost);
    EXPECT_EQ(value, 7);
  }
  const FakeCudaSettings plain{};
  fake_cuda_configure(&plain);
}

TEST(FakeRuntimeDeathTest, LeaksAndMisusesEndTheProcessWithAReport) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        cudaStream_t stream = nullptr;
        cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, 0);
        std::exit(0);
      },
      testing::ExitedWithCode(3), "left at exit: 1 streams");
  EXPECT_EXIT(
      {
        cudaFree(&stdout);
        std::exit(0);
      },
      testing::ExitedWithCode(3), "1 misuses");
}

}  // namespace
