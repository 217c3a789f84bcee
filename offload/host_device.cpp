// The host device: an arena and memcpy.
#include <cstring>

#include "engine/base/error.h"
#include "offload/arena.h"
#include "offload/device.h"

namespace overspill {
namespace {

class HostDevice : public Device {
 public:
  HostDevice(uint64_t bytes, bool unified) : arena_(bytes, "device"), unified_(unified) {}
  const char* name() const override { return unified_ ? "host (unified)" : "host (discrete)"; }
  bool unified() const override { return unified_; }
  std::byte* memory() const override { return arena_.memory(); }
  uint64_t memory_bytes() const override { return arena_.bytes(); }
  void copy_to_device(std::byte* device, const std::byte* host, uint64_t bytes) override {
    CHECK(device >= memory() && device + bytes <= memory() + memory_bytes());
    std::memcpy(device, host, bytes);
  }
  void copy_to_host(std::byte* host, const std::byte* device, uint64_t bytes) override {
    CHECK(device >= memory() && device + bytes <= memory() + memory_bytes());
    std::memcpy(host, device, bytes);
  }

 private:
  Arena arena_;
  bool unified_;
};

}  // namespace

std::unique_ptr<Device> make_host_device(uint64_t bytes, bool unified) {
  return std::make_unique<HostDevice>(bytes, unified);
}

}  // namespace overspill
