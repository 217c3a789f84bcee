// A compute device's memory, copies and streams. Work is put on a stream and done in order; streams
// overlap, and only events order them. Each stream is fed by one thread at a time, the threads of
// different streams at once. The host device stands for a GPU in tests: its memory is an arena of
// its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace overspill {

enum class DeviceStream : uint8_t { compute, h2d, d2h, collective };
inline constexpr size_t kDeviceStreams = 4;
const char* device_stream_name(DeviceStream stream);

/// A point in a stream's work, recorded again and again. Until the first record it is done.
/// Destroyed before its device.
class DeviceEvent {
 public:
  virtual ~DeviceEvent() = default;
  /// Whether all that was on the stream before the record is done. Throws when the device failed.
  virtual bool done() = 0;
  /// The calling thread waits, without spinning. Throws when the device failed.
  virtual void synchronize() = 0;
};

class Device;

/// Keeps host memory pinned. Destroyed before its device and before the memory is freed; waits for
/// what is on the device's streams then.
class HostRegistration {
 public:
  HostRegistration() = default;
  HostRegistration(HostRegistration&& other) noexcept
      : device_(std::exchange(other.device_, nullptr)), host_(other.host_) {}
  HostRegistration& operator=(HostRegistration&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(host_, other.host_);
    return *this;
  }
  ~HostRegistration();

 private:
  friend Device;
  HostRegistration(Device& device, std::span<std::byte> host) : device_(&device), host_(host) {}
  Device* device_ = nullptr;
  std::span<std::byte> host_;
};

class Device {
 public:
  virtual ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  const char* name() const { return name_.c_str(); }
  /// True when the host addresses the device's memory: no copies are needed.
  bool unified() const { return unified_; }
  /// The device's arena, allocated once at construction; contents start as zero.
  std::byte* memory() const { return memory_.data(); }
  uint64_t memory_bytes() const { return memory_.size(); }

  /// On the h2d stream, behind what is there; returns when done. Any host memory.
  void copy_to_device(std::byte* device, const std::byte* host, uint64_t bytes);
  /// The same on the d2h stream.
  void copy_to_host(std::byte* host, const std::byte* device, uint64_t bytes);

  /// Pins memory for enqueue_copy, once and while no thread copies. Throws Error(does_not_fit) when
  /// the system refuses.
  [[nodiscard]] HostRegistration register_host(std::span<std::byte> host);
  /// Returns at once. Each end lies in the device's memory or in one registration, one end at least
  /// in the device's.
  void enqueue_copy(DeviceStream stream, std::byte* to, const std::byte* from, uint64_t bytes);

  virtual std::unique_ptr<DeviceEvent> make_event() = 0;
  virtual void record(DeviceEvent& event, DeviceStream stream) = 0;
  /// What is put on the stream from now on begins after the event's last record is done. The host
  /// does not wait.
  virtual void wait(DeviceStream stream, DeviceEvent& event) = 0;
  /// Calls function(argument) in the stream's order on a thread of the device. It must neither
  /// throw nor use a device. After a device has failed it may never be called.
  virtual void launch_host_function(DeviceStream stream, void (*function)(void*),
                                    void* argument) = 0;
  /// The calling thread waits for all that is on the stream. Throws when the device failed.
  virtual void synchronize(DeviceStream stream) = 0;

 protected:
  Device(std::string name, bool unified) : name_(std::move(name)), unified_(unified) {}
  void set_memory(std::span<std::byte> memory) { memory_ = memory; }
  bool in_memory(const std::byte* begin, uint64_t bytes) const;

 private:
  friend HostRegistration;
  virtual void pin(std::span<std::byte> host) = 0;
  virtual void unpin(std::span<std::byte> host) noexcept = 0;
  virtual void put_copy(DeviceStream stream, std::byte* to, const std::byte* from,
                        uint64_t bytes) = 0;
  /// A copy that is done on return; the host's end may be pageable.
  virtual void copy_now(DeviceStream stream, std::byte* to, const std::byte* from, uint64_t bytes,
                        bool pinned) = 0;
  bool registered(const std::byte* begin, uint64_t bytes) const;

  std::string name_;
  bool unified_;
  std::span<std::byte> memory_;
  std::vector<std::span<std::byte>> registrations_;
};

/// The host as a device: unified, or discrete (as a GPU is).
std::unique_ptr<Device> make_host_device(uint64_t bytes, bool unified);

}  // namespace overspill
