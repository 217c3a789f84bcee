// STREAM's triad (McCalpin 1995), the yardstick of memory bandwidth.
#pragma once

#include <cstdint>

namespace overspill {

/// a = b + 3 c by all threads, with stores that bypass the caches where the processor has them, so
/// that no line is read before it is written: 12 bytes per element. 64-byte aligned arrays.
void triad(float* a, const float* b, const float* c, uint64_t size);

}  // namespace overspill
