// The Llama family's layers, and the maths of any model's state, on an NVIDIA GPU. Without GPU
// kernels in the build they are there and refuse (no_cuda_model.cpp); CUDA's headers are not
// needed.
#pragma once

#include <cstdint>
#include <memory>

#include "engine/model/layers.h"
#include "engine/model/model.h"
#include "engine/model/state_math.h"

namespace overspill {

/// Empty, or why this build has no kernels for GPUs and what to do.
const char* cuda_model_absence();

/// Opens NVIDIA's libraries on the GPU and chooses all plans, so that the scratch is known. Weights
/// and activations are of the type, f32 or bf16. Throws Error(not_found) without the kernels or a
/// library, Error(invalid_config) for what no kernel supports, Error(io) when CUDA fails.
std::unique_ptr<Model> make_cuda_model(const ModelShape& model, DType type, const BatchShape& batch,
                                       uint32_t gpu);

/// The maths of its state, with kernels of the build alone. Throws Error(not_found) without them.
std::unique_ptr<StateMath> make_cuda_state_math(const ModelShape& model);

}  // namespace overspill
