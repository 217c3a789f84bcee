// Copies as work to repeat. Every copy takes the next piece of its memory, so that none finds its
// bytes in a cache. Works of one device are for one thread per direction.
#pragma once

#include <cstddef>
#include <cstdint>

#include "engine/bench/bench_rounds.h"
#include "offload/device.h"

namespace overspill {

enum class CopyDirection : uint8_t { to_device, to_host };

/// Memory that copies cycle through: so many bytes of the host for each direction, and twice so
/// many of the device, the first half for copies to it.
struct CopyMemory {
  Device* device;
  std::byte* to_device;  ///< where copies to the device come from
  std::byte* to_host;    ///< where copies to the host go to
  uint64_t bytes;        ///< of each of them
};

/// One copy that is waited for; any host memory.
BenchWork single_copy(const CopyMemory& memory, uint64_t bytes, CopyDirection direction);

/// All of the memory once, in copies that are enqueued together and waited for by an event, as a
/// lane enqueues them: the host does not wait between them. The host memory is registered.
BenchWork queued_copies(const CopyMemory& memory, uint64_t bytes, CopyDirection direction);

}  // namespace overspill
