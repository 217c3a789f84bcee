// What a device computes of a model: its layers as functions of the device's memory. One compute
// thread at a time. On the host a call returns when done; on a GPU it puts work on the compute
// stream and returns.
#pragma once

#include <cstddef>
#include <cstdint>

#include "engine/base/dtype.h"
#include "offload/device.h"

namespace overspill {

/// One micro-batch's shape.
struct BatchShape {
  uint64_t sequences = 1;
  uint64_t sequence_len = 0;
  bool documents = false;  ///< sequences may hold several: document_begins may be given below
  uint64_t tokens() const { return sequences * sequence_len; }
};

class Model {
 public:
  virtual ~Model() = default;

  /// Memory of the device that the calls below need, in bytes, a multiple of 4096. Fixed for the
  /// run.
  virtual uint64_t scratch_bytes() const = 0;
  /// How activations are stored.
  virtual DType activation_type() const = 0;
  /// Before the first call below: the device that holds all memory, and the scratch in it, aligned
  /// to 4096. Both outlive the calls.
  virtual void attach(Device& device, std::byte* scratch) = 0;

  // x, y, dx and dy are activations, [tokens, hidden].
  // Weights and sums are a layer's flattened parameters. Tokens, targets, the documents' begins and
  // results are the host's memory, pinned where the device is a GPU.

  virtual void embed(const void* weights, const int32_t* tokens, void* y) const = 0;
  /// Sums into the embedding's gradient; `first` zeroes it before.
  virtual void embed_backward(const int32_t* tokens, const void* dy, float* sums,
                              bool first) const = 0;
  /// One block: x -> y. `document_begins`: null, or per token the position in its sequence where
  /// its document begins; then it attends to its own document alone.
  virtual void block(uint32_t layer, const void* weights, const int32_t* document_begins,
                     const void* x, void* y) const = 0;
  /// dy becomes dx; gradients of trainable tensors add up in `sums` (float32; the rest is zeroed
  /// when `first`). `sums` is null where the whole layer is frozen.
  virtual void block_backward(uint32_t layer, const void* weights, const int32_t* document_begins,
                              const void* x, void* dy, float* sums, bool first) const = 0;

  struct Head {
    const void* weights;    ///< final norm [, output projection]
    const void* embedding;  ///< the output projection when tied, else null
    float* sums;            ///< null for evaluation, and when all of the head is frozen
    float* embedding_sums;  ///< when tied and the embedding trains
    bool first;             ///< sums (and embedding_sums) start from zero
  };
  /// *total = negative log-likelihood summed over the micro-batch's tokens but for those whose
  /// target is kNotTrained. Unless dx is null, it receives scale * gradient, and sums add up the
  /// weights'; scale is not 0 then.
  virtual void loss(const Head& head, const void* x, const int32_t* targets, float scale, void* dx,
                    double* total) const = 0;
};

}  // namespace overspill
