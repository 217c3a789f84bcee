// Adds gradients of the program's types to float32 sums, in parallel. Every element is summed by
// itself, so that no bit depends on threads. Thread-safe.
#pragma once

#include <cstdint>

#include "engine/base/dtype.h"

namespace overspill {

/// sums (+)= values; `first`: sums receive them as they are.
void add_gradient(const void* values, DType type, float* sums, uint64_t count, bool first);

}  // namespace overspill
