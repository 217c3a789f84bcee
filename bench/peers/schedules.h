// One training step of two other systems as Programs, for the simulator: what moves when, by lane,
// with named dependencies instead of slots. They cannot be executed or verified.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/plan/layout.h"
#include "engine/program/program.h"

namespace overspill {

/// The part of a layout that peers' Programs and the cost model need: the model and the options.
Layout peer_layout(const ModelShape& model, const PlanOptions& options);

/// DeepSpeed ZeRO-3 with the optimizer on NVMe and bf16 weights on the devices. Micro-batch-major:
/// each micro-batch gathers every layer's weights for its forward and again for its backward. In
/// the last backward, gradients fill `buffers` host buffers of the largest update group as float32
/// (4 bytes a parameter), each written when it is full; when all are used, the backward waits until
/// all are written. Then the update: what is left of the gradients is written, and by groups,
/// gradient, master and moments are read (16 bytes), master and moments written (12).
Program deepspeed_step(const Layout& layout, uint32_t buffers);

/// Parameters of one rank's update groups: whole tensors until a group has 1e8 (sub_group_size).
/// Query, key and value are one tensor, gate and up another; norms are left out.
std::vector<uint64_t> deepspeed_groups(const Layout& layout);

/// LoHan on one device: weights, master and moments on NVMe. Weights are read for the forward and
/// again for the backward (2 bytes a parameter each); a layer's gradient is used as soon as it is
/// in host memory: master and moments read (12), updated, and written with the new weights (14),
/// beside the backward of the layers below. Inputs of blocks go to host memory; blocks are
/// recomputed.
Program lohan_step(const Layout& layout);

}  // namespace overspill
