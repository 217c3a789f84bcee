// A compute device's memory and copies. Each call is made by the lane it belongs to and returns
// when done, so that lanes overlap with each other; a device must allow concurrent calls from
// different lanes. The host device stands for a GPU in tests: its memory is an arena of its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace overspill {

class Device {
 public:
  virtual ~Device() = default;
  virtual const char* name() const = 0;
  /// True when the host addresses the device's memory: no copies are needed.
  virtual bool unified() const = 0;
  /// The device's arena, allocated once at construction.
  virtual std::byte* memory() const = 0;
  virtual uint64_t memory_bytes() const = 0;
  /// The h2d lane's copy.
  virtual void copy_to_device(std::byte* device, const std::byte* host, uint64_t bytes) = 0;
  /// The d2h lane's copy.
  virtual void copy_to_host(std::byte* host, const std::byte* device, uint64_t bytes) = 0;
};

/// The host as a device: unified, or discrete (as a GPU is).
std::unique_ptr<Device> make_host_device(uint64_t bytes, bool unified);

}  // namespace overspill
