// Optimizer updates on the GPU with the host's bits (optim/optimizer.h), so that states may be
// updated on either side: the same operations in the same order, each rounded correctly, none
// fused.
#pragma once

#include <cuda_runtime_api.h>

#include <span>

#include "optim/optimizer.h"

namespace overspill::cuda {

/// As overspill::update_chunk, enqueued, for every optimizer and format; the chunk's arrays are the
/// device's, aligned to 16 bytes, also its averages. Moments that are not finite may have other
/// bits than the host's.
void update_chunk(cudaStream_t stream, const OptimizerSettings& settings, const UpdateStep& step,
                  const UpdateChunk& chunk, std::span<const UpdateRun> runs, bool moments_zero);

}  // namespace overspill::cuda
