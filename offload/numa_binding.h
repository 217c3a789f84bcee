// Memory on chosen NUMA nodes. Threads are bound by CpuBinding (engine/base/thread.h).
#pragma once

#include <cstddef>
#include <cstdint>

namespace overspill {

/// Moves page-aligned memory to the node; false when the system refuses, and nothing changes then.
bool place_on_node(std::byte* memory, uint64_t bytes, uint32_t node);

}  // namespace overspill
