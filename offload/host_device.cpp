// The host device: an arena, memcpy, and streams that are threads. A stream's thread starts with
// the first work put on it; copies that are waited for run on the caller's thread.
#include <array>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include "engine/base/error.h"
#include "engine/base/thread.h"
#include "offload/arena.h"
#include "offload/device.h"

namespace overspill {
namespace {

/// A queue of work and the thread that does it, in order. Work is counted: a point in it is the
/// number of pieces put before.
class HostStream {
 public:
  ~HostStream() { close(); }

  void put(std::function<void()> work) {
    const std::lock_guard lock(mutex_);
    if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
    queue_.push_back(std::move(work));
    ++put_;
    changed_.notify_all();
  }
  uint64_t put_count() {
    const std::lock_guard lock(mutex_);
    return put_;
  }
  bool done(uint64_t count) {
    const std::lock_guard lock(mutex_);
    return done_ >= count;
  }
  void wait(uint64_t count) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return done_ >= count; });
  }
  /// Does what is left, then ends the thread.
  void close() {
    {
      const std::lock_guard lock(mutex_);
      closing_ = true;
      changed_.notify_all();
    }
    if (thread_.joinable()) thread_.join();
  }

 private:
  void run() {
    set_thread_name("device stream");
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return closing_ || !queue_.empty(); });
      if (queue_.empty()) return;
      const std::function<void()> work = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      work();
      lock.lock();
      ++done_;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  uint64_t put_ = 0, done_ = 0;
  bool closing_ = false;
  std::thread thread_;
};

class HostEvent final : public DeviceEvent {
 public:
  bool done() override { return !stream || stream->done(count); }
  void synchronize() override {
    if (stream) stream->wait(count);
  }

  HostStream* stream = nullptr;
  uint64_t count = 0;
};

class HostDevice final : public Device {
 public:
  HostDevice(uint64_t bytes, bool unified)
      : Device(unified ? "host (unified)" : "host (discrete)", unified), arena_(bytes, "device") {
    set_memory({arena_.memory(), arena_.bytes()});
  }
  ~HostDevice() override {
    for (HostStream& stream : streams_) stream.close();  // one may wait for another
  }

  std::unique_ptr<DeviceEvent> make_event() override { return std::make_unique<HostEvent>(); }
  void record(DeviceEvent& event, DeviceStream stream) override {
    auto& point = static_cast<HostEvent&>(event);
    point.stream = &at(stream);
    point.count = point.stream->put_count();
  }
  void wait(DeviceStream stream, DeviceEvent& event) override {
    const auto& point = static_cast<const HostEvent&>(event);
    if (!point.stream || point.stream == &at(stream)) return;
    at(stream).put([other = point.stream, count = point.count] { other->wait(count); });
  }
  void launch_host_function(DeviceStream stream, void (*function)(void*), void* argument) override {
    at(stream).put([=] { function(argument); });
  }
  void synchronize(DeviceStream stream) override { at(stream).wait(at(stream).put_count()); }

 private:
  HostStream& at(DeviceStream stream) { return streams_[static_cast<size_t>(stream)]; }
  void pin(std::span<std::byte>) override {}
  void unpin(std::span<std::byte>) noexcept override {
    for (HostStream& stream : streams_) stream.wait(stream.put_count());
  }
  void put_copy(DeviceStream stream, std::byte* to, const std::byte* from,
                uint64_t bytes) override {
    at(stream).put([=] { std::memmove(to, from, bytes); });
  }
  void copy_now(DeviceStream stream, std::byte* to, const std::byte* from, uint64_t bytes,
                bool) override {
    synchronize(stream);
    std::memcpy(to, from, bytes);
  }

  Arena arena_;
  std::array<HostStream, kDeviceStreams> streams_;
};

}  // namespace

std::unique_ptr<Device> make_host_device(uint64_t bytes, bool unified) {
  return std::make_unique<HostDevice>(bytes, unified);
}

}  // namespace overspill
