// Which bytes go where.
#include "engine/bench/copy_works.h"

#include <algorithm>
#include <memory>

#include "engine/base/error.h"

namespace overspill {
namespace {

/// More than a driver's queue holds is not more at once.
constexpr uint64_t kMostQueued = 1024;

struct Ends {
  std::byte *host, *device;
};

Ends piece_of(const CopyMemory& memory, uint64_t piece, uint64_t bytes, CopyDirection direction) {
  const uint64_t at = piece % (memory.bytes / bytes) * bytes;
  if (direction == CopyDirection::to_device) {
    return {memory.to_device + at, memory.device->memory() + at};
  }
  return {memory.to_host + at, memory.device->memory() + memory.bytes + at};
}

void check_sizes(const CopyMemory& memory, uint64_t bytes) {
  CHECK(bytes > 0 && bytes <= memory.bytes);
  CHECK(2 * memory.bytes <= memory.device->memory_bytes());
}

}  // namespace

BenchWork single_copy(const CopyMemory& memory, uint64_t bytes, CopyDirection direction) {
  check_sizes(memory, bytes);
  return {static_cast<double>(bytes), [=, turn = uint64_t{0}]() mutable {
            const Ends ends = piece_of(memory, turn++, bytes, direction);
            direction == CopyDirection::to_device
                ? memory.device->copy_to_device(ends.device, ends.host, bytes)
                : memory.device->copy_to_host(ends.host, ends.device, bytes);
          }};
}

BenchWork queued_copies(const CopyMemory& memory, uint64_t bytes, CopyDirection direction) {
  check_sizes(memory, bytes);
  const uint64_t count = std::min(memory.bytes / bytes, kMostQueued);
  const std::shared_ptr<DeviceEvent> last = memory.device->make_event();
  return {static_cast<double>(count * bytes), [=, turn = uint64_t{0}]() mutable {
            const bool up = direction == CopyDirection::to_device;
            const DeviceStream stream = up ? DeviceStream::h2d : DeviceStream::d2h;
            for (uint64_t i = 0; i < count; ++i) {
              const Ends ends = piece_of(memory, turn++, bytes, direction);
              memory.device->enqueue_copy(stream, up ? ends.device : ends.host,
                                          up ? ends.host : ends.device, bytes);
            }
            memory.device->record(*last, stream);
            last->synchronize();
          }};
}

}  // namespace overspill
