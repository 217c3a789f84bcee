// Optimizer updates on the GPU with the host's bits (optim/optimizer.h), so that states may be
// updated on either side: the same operations in the same order, each rounded correctly, none
// fused.
#pragma once

#include <cuda_runtime_api.h>

#include <span>

#include "optim/optimizer.h"

namespace overspill::cuda {

/// AdamW, Lion and SGD with float32 state, either master.
bool updates_on_device(const OptimizerSettings& settings);

/// As overspill::update_chunk, enqueued; the chunk's arrays are the device's, aligned to 16 bytes.
/// The settings are ones that updates_on_device allows.
void update_chunk(cudaStream_t stream, const OptimizerSettings& settings, const UpdateStep& step,
                  const UpdateChunk& chunk, std::span<const UpdateRun> runs, bool moments_zero);

}  // namespace overspill::cuda
