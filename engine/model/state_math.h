// What a device computes of a model's state, whatever its layers are: sums over gradients, and
// optimizer updates, on the device's memory. One compute thread at a time. On the host a call
// returns when done; on a GPU it puts work on the compute stream and returns.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "engine/base/dtype.h"
#include "offload/device.h"
#include "optim/optimizer.h"

namespace overspill {

class StateMath {
 public:
  virtual ~StateMath() = default;

  /// Memory of the device that the calls below need, in bytes, a multiple of 4096. Fixed for the
  /// run.
  virtual uint64_t scratch_bytes() const = 0;
  /// Before the first call below: the device that holds all memory, and the scratch in it, aligned
  /// to 4096. Both outlive the calls.
  virtual void attach(Device& device, std::byte* scratch) = 0;

  /// *total = the squares of a layer's gradient sums, trainable tensor by tensor in float64, of its
  /// parameters [begin, end), whose first `sums` points to. The host's memory, pinned where the
  /// device is a GPU, as those of `moments`.
  virtual void square_sum(uint32_t layer, const float* sums, uint64_t begin, uint64_t end,
                          double* total) const = 0;
  /// Sets a matrix's sums over rows and columns to those of its elements among [begin, end).
  virtual void factored_sums(const float* sums, uint64_t begin, uint64_t end,
                             const FactoredMatrix& matrix,
                             const FactoredMoments& moments) const = 0;
  /// Rounds to bf16. `gradient` may be `sums`.
  virtual void round_gradient(const float* sums, uint16_t* gradient, uint64_t size) const = 0;
  /// update_chunk() on the device's memory.
  virtual void update(const OptimizerSettings& settings, const UpdateStep& step,
                      const UpdateChunk& chunk, std::span<const UpdateRun> runs,
                      bool moments_zero) const = 0;
  /// sums (+)= a gradient of the type; `first`: they receive it as it is. For any thread. On a GPU
  /// on a stream of the program's (cudaStream_t), else it is null.
  virtual void add_gradient(void* stream, const void* gradient, DType type, float* sums,
                            uint64_t size, bool first) const = 0;
};

}  // namespace overspill
