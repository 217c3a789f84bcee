// What every Device promises, on the host device and on a GPU whose runtime is the fake one; built
// for a real GPU, on that.
#include "offload/device.h"

#include <gtest/gtest.h>

#include <cstring>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "offload/cuda_device.h"
#include "tests/emulation/fake_runtime_access.h"
#include "tests/emulation/test_memory.h"

namespace overspill {
namespace {

using test::fake_cuda_is_built;

enum class Kind { host, fake_cuda, cuda };
struct Case {
  Kind kind;
  uint64_t seed;
};

std::vector<Case> cases() {
  if (test::kOnGpu) return {{Kind::cuda, 0}};
  return {{Kind::host, 0}, {Kind::fake_cuda, 1}, {Kind::fake_cuda, 2}, {Kind::fake_cuda, 3}};
}

constexpr uint64_t kPage = 4096, kPages = 8, kBytes = kPage * kPages;
constexpr auto kH2d = DeviceStream::h2d, kD2h = DeviceStream::d2h;
constexpr auto kCompute = DeviceStream::compute, kCollective = DeviceStream::collective;

/// Ordinary memory that starts on a page, as arenas' does.
struct PageMemory {
  PageMemory() = default;
  explicit PageMemory(uint64_t bytes)
      : memory(static_cast<std::byte*>(::operator new (bytes, std::align_val_t{kPage}))),
        bytes(bytes) {
    std::memset(memory.get(), 0, bytes);
  }
  std::span<std::byte> span() const { return {memory.get(), bytes}; }
  struct Free {
    void operator()(std::byte* begin) const { ::operator delete (begin, std::align_val_t{kPage}); }
  };
  std::unique_ptr<std::byte, Free> memory;
  uint64_t bytes = 0;
};

class DeviceContract : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    GTEST_FLAG_SET(death_test_style, "threadsafe");
    if (GetParam().kind == Kind::host) {
      device_ = make_host_device(kBytes, /*unified=*/false);
    } else if (GetParam().kind == Kind::cuda) {
      device_ = make_cuda_device(kBytes, 0);
    } else {
      if (!fake_cuda_is_built()) GTEST_SKIP() << "built without CUDA's headers";
      const FakeCudaSettings settings{.seed = GetParam().seed, .max_delay_us = 100};
      FAKE_CUDA(fake_cuda_configure)(&settings);
      device_ = make_cuda_device(kBytes, 0);
    }
    host_ = PageMemory{kBytes};
    pinned_ = device_->register_host(host_.span());
  }
  void TearDown() override {
    pinned_ = {};
    device_.reset();
    if (GetParam().kind != Kind::fake_cuda || !fake_cuda_is_built()) return;
    EXPECT_EQ(test::take_fake_cuda_misuses(), "");
    const FakeCudaLive live = FAKE_CUDA(fake_cuda_live)();
    EXPECT_EQ(live.streams + live.events + live.allocations + live.registrations, 0u);
  }

  std::byte* host(uint64_t page) const { return host_.memory.get() + page * kPage; }
  std::byte* on_device(uint64_t page) { return device_->memory() + page * kPage; }
  void fill(uint64_t page, int value) { std::memset(host(page), value, kPage); }
  bool holds(uint64_t page, int value) {
    for (uint64_t i = 0; i < kPage; ++i) {
      if (host(page)[i] != static_cast<std::byte>(value)) return false;
    }
    return true;
  }

  std::unique_ptr<Device> device_;
  PageMemory host_;
  HostRegistration pinned_;
};

INSTANTIATE_TEST_SUITE_P(Devices, DeviceContract, testing::ValuesIn(cases()), [](const auto& info) {
  return info.param.kind == Kind::host ? std::string("Host")
                                       : "Cuda" + std::to_string(info.param.seed);
});

/// Holds a stream until it is opened.
class Gate {
 public:
  Gate(Device& device, DeviceStream stream) { device.launch_host_function(stream, wait, this); }
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

TEST_P(DeviceContract, MemoryStartsAsZero) {
  fill(0, 1);
  device_->copy_to_host(host(0), on_device(kPages - 1), kPage);
  EXPECT_TRUE(holds(0, 0));
  EXPECT_GE(device_->memory_bytes(), kBytes);
  EXPECT_FALSE(device_->unified());
}

TEST_P(DeviceContract, CopiesThatReturnWhenDoneTakeAnyHostMemory) {
  std::vector<std::byte> pageable(1000, std::byte{9}), back(1000);
  device_->copy_to_device(on_device(1), pageable.data(), pageable.size());
  device_->copy_to_host(back.data(), on_device(1), back.size());
  EXPECT_EQ(back, pageable);
  fill(2, 5);
  device_->copy_to_device(on_device(2), host(2), kPage);
  device_->copy_to_host(host(3), on_device(2), kPage);
  EXPECT_TRUE(holds(3, 5));
  device_->copy_to_device(on_device(0), pageable.data(), 0);
}

TEST_P(DeviceContract, CopiesThatReturnWhenDoneComeAfterTheirStreamsWork) {
  fill(0, 1);
  fill(1, 2);
  device_->enqueue_copy(kH2d, on_device(0), host(0), kPage);
  device_->copy_to_device(on_device(0), host(1), kPage);
  device_->copy_to_host(host(2), on_device(0), kPage);
  EXPECT_TRUE(holds(2, 2));
}

TEST_P(DeviceContract, AStreamWorksInOrder) {
  for (uint64_t i = 0; i < 6; ++i) {
    fill(i, static_cast<int>(i) + 1);
    device_->enqueue_copy(kH2d, on_device(0), host(i), kPage);
  }
  device_->enqueue_copy(kH2d, host(7), on_device(0), kPage);
  device_->synchronize(kH2d);
  EXPECT_TRUE(holds(7, 6));
}

TEST_P(DeviceContract, AnEventIsDoneBeforeItsFirstRecord) {
  const auto event = device_->make_event();
  EXPECT_TRUE(event->done());
  event->synchronize();
  device_->wait(kCompute, *event);
  device_->synchronize(kCompute);
}

TEST_P(DeviceContract, OnlyEventsOrderStreams) {
  const auto copied = device_->make_event(), moved = device_->make_event();
  fill(0, 3);
  Gate gate(*device_, kH2d);
  device_->enqueue_copy(kH2d, on_device(0), host(0), kPage);
  device_->record(*copied, kH2d);
  device_->enqueue_copy(kD2h, host(1), on_device(0), kPage);
  device_->synchronize(kD2h);  // the gate does not hold it
  EXPECT_TRUE(holds(1, 0));
  device_->wait(kD2h, *copied);
  device_->enqueue_copy(kD2h, host(2), on_device(0), kPage);
  device_->record(*moved, kD2h);
  EXPECT_FALSE(copied->done());
  EXPECT_FALSE(moved->done());
  gate.open();
  moved->synchronize();
  EXPECT_TRUE(copied->done());
  EXPECT_TRUE(holds(2, 3));
}

TEST_P(DeviceContract, AWaitIsForTheRecordBeforeIt) {
  const auto event = device_->make_event();
  device_->record(*event, kH2d);
  device_->wait(kCompute, *event);
  Gate gate(*device_, kH2d);
  device_->record(*event, kH2d);
  device_->synchronize(kCompute);
  EXPECT_FALSE(event->done());
}

TEST_P(DeviceContract, StreamsOverlap) {
  std::vector<std::unique_ptr<Gate>> gates;
  const auto last = device_->make_event();
  for (const auto stream : {kCompute, kH2d, kD2h}) {
    gates.push_back(std::make_unique<Gate>(*device_, stream));
  }
  fill(0, 4);
  device_->enqueue_copy(kCollective, on_device(0), host(0), kPage);
  device_->enqueue_copy(kCollective, on_device(1), on_device(0), kPage);
  device_->enqueue_copy(kCollective, host(1), on_device(1), kPage);
  device_->record(*last, kCollective);
  last->synchronize();
  EXPECT_TRUE(holds(1, 4));
  // One thread may call them all, in any order.
  for (const auto& gate : gates) gate->open();
}

TEST_P(DeviceContract, HostFunctionsRunInTheOrderOfTheirStream) {
  struct Seen {
    std::byte* page;
    int before = -1, after = -1;
  } seen{host(1)};
  fill(0, 6);
  device_->enqueue_copy(kH2d, on_device(0), host(0), kPage);
  device_->launch_host_function(
      kH2d, [](void* s) { static_cast<Seen*>(s)->before = int(*static_cast<Seen*>(s)->page); },
      &seen);
  device_->enqueue_copy(kH2d, host(1), on_device(0), kPage);
  device_->launch_host_function(
      kH2d, [](void* s) { static_cast<Seen*>(s)->after = int(*static_cast<Seen*>(s)->page); },
      &seen);
  device_->synchronize(kH2d);
  EXPECT_EQ(seen.before, 0);
  EXPECT_EQ(seen.after, 6);
}

/// Pages go up, are moved on the device and come down, by a thread per lane that never waits for
/// the device: a pipeline of events with two slots on the device.
TEST_P(DeviceContract, LanesPipelinedByEventsMoveEveryPage) {
  constexpr uint64_t kRounds = 40, kSlots = 2;
  struct Step {
    std::unique_ptr<DeviceEvent> up, moved, down;
    std::promise<void> up_put, moved_for_up, moved_for_down, down_put;
  };
  std::vector<Step> steps(kRounds);
  for (Step& step : steps) {
    for (auto* event : {&step.up, &step.moved, &step.down}) *event = device_->make_event();
  }
  std::vector<int> results(kRounds, -1);
  for (uint64_t i = 0; i < kSlots; ++i) fill(i, static_cast<int>(i) + 1);
  // Slots: pages 0, 1 of the device are filled, 2, 3 are moved to, 4, 5 of the host receive.
  std::thread up([&] {
    for (uint64_t i = 0; i < kRounds; ++i) {
      if (i >= kSlots) {
        steps[i - kSlots].moved_for_up.get_future().wait();
        device_->wait(kH2d, *steps[i - kSlots].moved);
      }
      device_->enqueue_copy(kH2d, on_device(i % kSlots), host(i % kSlots), kPage);
      device_->record(*steps[i].up, kH2d);
      steps[i].up_put.set_value();
    }
  });
  std::thread move([&] {
    for (uint64_t i = 0; i < kRounds; ++i) {
      steps[i].up_put.get_future().wait();
      device_->wait(kCompute, *steps[i].up);
      if (i >= kSlots) {
        steps[i - kSlots].down_put.get_future().wait();
        device_->wait(kCompute, *steps[i - kSlots].down);
      }
      device_->enqueue_copy(kCompute, on_device(2 + i % kSlots), on_device(i % kSlots), kPage);
      device_->record(*steps[i].moved, kCompute);
      steps[i].moved_for_up.set_value();
      steps[i].moved_for_down.set_value();
    }
  });
  std::thread down([&] {
    for (uint64_t i = 0; i < kRounds; ++i) {
      steps[i].moved_for_down.get_future().wait();
      device_->wait(kD2h, *steps[i].moved);
      device_->enqueue_copy(kD2h, host(4 + i % kSlots), on_device(2 + i % kSlots), kPage);
      device_->record(*steps[i].down, kD2h);
      steps[i].down_put.set_value();
      steps[i].down->synchronize();
      results[i] = int(host(4 + i % kSlots)[kPage - 1]);
    }
  });
  for (std::thread* thread : {&up, &move, &down}) thread->join();
  for (uint64_t i = 0; i < kRounds; ++i) EXPECT_EQ(results[i], static_cast<int>(i % kSlots) + 1);
  for (const auto stream : {kH2d, kCompute, kD2h}) device_->synchronize(stream);
}

TEST_P(DeviceContract, AsynchronousCopiesAreOfPinnedMemoryOnly) {
  std::vector<std::byte> pageable(kPage);
  EXPECT_DEATH(device_->enqueue_copy(kH2d, on_device(0), pageable.data(), kPage), "registered");
  EXPECT_DEATH(device_->enqueue_copy(kD2h, pageable.data(), on_device(0), kPage), "registered");
  EXPECT_DEATH(device_->enqueue_copy(kH2d, on_device(0), host(7), kPage + 1), "registered");
  EXPECT_DEATH(device_->enqueue_copy(kD2h, host(0), host(1), kPage), "to_device");
  EXPECT_DEATH(device_->copy_to_device(on_device(7), host(0), kBytes), "in_memory");
  EXPECT_DEATH((void)device_->register_host({host(1), kPage}), "registrations_");
}

TEST_P(DeviceContract, ARegistrationEndsAfterTheWorkOnItsMemory) {
  const PageMemory other{kPage};
  std::memset(other.memory.get(), 8, kPage);
  {
    const HostRegistration pinned = device_->register_host(other.span());
    device_->enqueue_copy(kH2d, on_device(0), other.memory.get(), kPage);
  }
  std::memset(other.memory.get(), 1, kPage);
  device_->copy_to_host(host(0), on_device(0), kPage);
  EXPECT_TRUE(holds(0, 8));
}

TEST(HostDevice, UnifiedMemoryIsTheHosts) {
  const auto device = make_host_device(kBytes, /*unified=*/true);
  EXPECT_TRUE(device->unified());
  device->memory()[0] = std::byte{1};
  EXPECT_STREQ(device->name(), "host (unified)");
}

}  // namespace
}  // namespace overspill
