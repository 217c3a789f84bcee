// What holds for every device: the bounds of copies and the registrations of host memory.
#include "offload/device.h"

#include <algorithm>

#include "engine/base/error.h"

namespace overspill {
namespace {

bool contains(std::span<const std::byte> outer, const std::byte* begin, uint64_t bytes) {
  return begin >= outer.data() && bytes <= outer.size() &&
         begin <= outer.data() + (outer.size() - bytes);
}

}  // namespace

const char* device_stream_name(DeviceStream stream) {
  switch (stream) {
    case DeviceStream::compute: return "compute";
    case DeviceStream::h2d: return "h2d";
    case DeviceStream::d2h: return "d2h";
    case DeviceStream::collective: return "collective";
  }
  return "unknown";
}

HostRegistration::~HostRegistration() {
  if (!device_) return;
  device_->unpin(host_);
  std::erase_if(device_->registrations_,
                [&](std::span<std::byte> other) { return other.data() == host_.data(); });
}

Device::~Device() { CHECK(registrations_.empty()); }

bool Device::in_memory(const std::byte* begin, uint64_t bytes) const {
  return contains(memory_, begin, bytes);
}

// No lock: it would order the lanes' threads, and so hide missing waits from ThreadSanitizer.
bool Device::registered(const std::byte* begin, uint64_t bytes) const {
  return std::ranges::any_of(registrations_, [&](std::span<const std::byte> host) {
    return contains(host, begin, bytes);
  });
}

HostRegistration Device::register_host(std::span<std::byte> host) {
  if (host.empty()) return {};
  CHECK(std::ranges::none_of(registrations_, [&](std::span<const std::byte> other) {
    return host.data() < other.data() + other.size() && other.data() < host.data() + host.size();
  }));
  pin(host);
  registrations_.push_back(host);
  return {*this, host};
}

void Device::copy_to_device(std::byte* device, const std::byte* host, uint64_t bytes) {
  CHECK(in_memory(device, bytes));
  if (bytes > 0) copy_now(DeviceStream::h2d, device, host, bytes, registered(host, bytes));
}

void Device::copy_to_host(std::byte* host, const std::byte* device, uint64_t bytes) {
  CHECK(in_memory(device, bytes));
  if (bytes > 0) copy_now(DeviceStream::d2h, host, device, bytes, registered(host, bytes));
}

void Device::enqueue_copy(DeviceStream stream, std::byte* to, const std::byte* from,
                          uint64_t bytes) {
  const bool to_device = in_memory(to, bytes), from_device = in_memory(from, bytes);
  CHECK(to_device || from_device);
  CHECK(to_device || registered(to, bytes));
  CHECK(from_device || registered(from, bytes));
  if (bytes > 0) put_copy(stream, to, from, bytes);
}

}  // namespace overspill
