// The emulation of CUDA kernels on the host, as tests see it: seeds, errors, and where launches
// run. Thread-safe.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <vector>

namespace overspill::emulation {

/// Of schedules: 0 runs threads in order; others draw the order of blocks, of warps (one may run
/// far ahead of the rest) and of lanes.
void set_seed(uint64_t seed);
/// What kernels did wrong since the last call: divergent barriers, writes beside shared memory.
std::vector<std::string> take_errors();
/// Kernels run since the start, for tests that count launches.
uint64_t launches();
/// Puts task(argument) on a stream, behind what is there. Null (the start): kernels run in the
/// launcher's call.
using Enqueue = void (*)(cudaStream_t stream, void (*task)(void*), void* argument);
void set_enqueue(Enqueue enqueue);

}  // namespace overspill::emulation
