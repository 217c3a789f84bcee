// Launches, and small copies between the scratch and pinned memory.
#include "engine/model/cuda_state.h"

#include <algorithm>

#include "engine/base/error.h"
#include "engine/model/cuda_kernels.h"
#include "optim/cuda_update.h"

namespace overspill::cuda {

CudaStateMath::CudaStateMath(const ModelShape& model)
    : model_(model), scratch_(cut_cuda_state_scratch(model, nullptr)) {
  CHECK(workspace_bytes() <= scratch_.workspace_bytes);
}

void CudaStateMath::attach(Device& device, std::byte* scratch) {
  device_ = dynamic_cast<CudaDevice*>(&device);
  CHECK(device_ != nullptr && reinterpret_cast<uintptr_t>(scratch) % 256 == 0);
  scratch_ = cut_cuda_state_scratch(model_, scratch);
}

cudaStream_t CudaStateMath::stream() const {
  return static_cast<cudaStream_t>(device_->native_stream(DeviceStream::compute));
}

uint64_t CudaStateMath::workspace_bytes() const {
  uint64_t most = 0;
  for (const LayerShape& layer : model_.layers) {
    most = std::max(most, sum_of_squares_workspace_bytes(layer.padded));
    for (const LayerTensor& t : layer.tensors) {
      if (t.shape.size() != 2) continue;
      most = std::max(most, row_column_squares_workspace_bytes(t.shape[0], t.shape[1]));
    }
  }
  return most;
}

void CudaStateMath::square_sum(uint32_t layer, const float* sums, uint64_t begin, uint64_t end,
                               double* total) const {
  const cudaStream_t on = stream();
  bool accumulate = false;
  for (const LayerTensor& tensor : model_.layers[layer].tensors) {
    const uint64_t first = std::max(tensor.offset, begin);
    const uint64_t last = std::min(tensor.offset + tensor.elements, end);
    if (!tensor.trainable || first >= last) continue;
    sum_of_squares(on, sums + (first - begin), last - first, scratch_.total, accumulate,
                   scratch_.workspace);
    accumulate = true;
  }
  if (!accumulate) fill_zero(on, reinterpret_cast<float*>(scratch_.total), 2);
  device_->enqueue_copy(DeviceStream::compute, reinterpret_cast<std::byte*>(total),
                        reinterpret_cast<const std::byte*>(scratch_.total), sizeof(double));
}

void CudaStateMath::factored_sums(const float* sums, uint64_t begin, uint64_t end,
                                  const FactoredMatrix& matrix,
                                  const FactoredMoments& moments) const {
  add_part_squares(stream(), sums, begin, end, matrix, scratch_.sums, scratch_.workspace);
  device_->enqueue_copy(DeviceStream::compute,
                        reinterpret_cast<std::byte*>(moments.sums + matrix.first),
                        reinterpret_cast<const std::byte*>(scratch_.sums),
                        (matrix.rows + matrix.columns) * sizeof(double));
}

void CudaStateMath::round_gradient(const float* sums, uint16_t* gradient, uint64_t size) const {
  float_to_bf16(stream(), sums, reinterpret_cast<__nv_bfloat16*>(gradient), size);
}

void CudaStateMath::update(const OptimizerSettings& settings, const UpdateStep& step,
                           const UpdateChunk& chunk, std::span<const UpdateRun> runs,
                           bool moments_zero) const {
  UpdateChunk there = chunk;
  if (chunk.averages != nullptr) there.averages = fetch_averages(chunk.averages, runs);
  update_chunk(stream(), settings, step, there, runs, moments_zero);
}

/// Copies the runs' averages to the GPU, where they keep their distances.
const float* CudaStateMath::fetch_averages(const float* averages,
                                           std::span<const UpdateRun> runs) const {
  uint64_t first = UINT64_MAX;
  for (const UpdateRun& run : runs) {
    if (run.matrix.rows > 0) first = std::min(first, run.matrix.first);
  }
  for (const UpdateRun& run : runs) {
    if (run.matrix.rows == 0) continue;
    device_->enqueue_copy(
        DeviceStream::compute,
        reinterpret_cast<std::byte*>(scratch_.averages + (run.matrix.first - first)),
        reinterpret_cast<const std::byte*>(averages + run.matrix.first),
        run.matrix.elements() * sizeof(float));
  }
  return first == UINT64_MAX ? nullptr : scratch_.averages - first;
}

void CudaStateMath::add_gradient(void* stream, const void* gradient, DType type, float* sums,
                                 uint64_t size, bool first) const {
  device_->use();
  const auto on = static_cast<cudaStream_t>(stream);
  switch (type) {
    case DType::f32: return accumulate(on, static_cast<const float*>(gradient), sums, size, first);
    case DType::bf16:
      return accumulate(on, static_cast<const __nv_bfloat16*>(gradient), sums, size, first);
    case DType::f16: return accumulate(on, static_cast<const __half*>(gradient), sums, size, first);
  }
}

}  // namespace overspill::cuda
