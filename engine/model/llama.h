// The Llama family's layers on the host, as two pure functions each: forward(weights, x) and
// backward(weights, x, dy), which recomputes what it needs from x. Activations are float32; every
// call returns when done.
#pragma once

#include <cstddef>
#include <cstdint>

#include "engine/model/kernels.h"
#include "engine/model/layers.h"
#include "engine/model/model.h"

namespace overspill {

class Llama final : public Model {
 public:
  /// `weight_type`: f32 or bf16, as all layers' flattened parameters are stored.
  Llama(const ModelShape& model, DType weight_type, const BatchShape& batch,
        const Kernels& kernels);

  uint64_t scratch_bytes() const override;
  /// The same with so many threads of the host at work.
  uint64_t scratch_bytes(uint32_t threads) const;
  DType activation_type() const override { return DType::f32; }
  void attach(Device&, std::byte* scratch) override { set_scratch(scratch); }
  /// Gives the scratch memory (64-byte aligned) and fills the rotary tables in it.
  void set_scratch(std::byte* memory);

  void embed(const void* weights, const int32_t* tokens, void* y) const override;
  void embed_backward(const int32_t* tokens, const void* dy, float* sums,
                      bool first) const override;
  void block(uint32_t layer, const void* weights, const int32_t* document_begins, const void* x,
             void* y) const override;
  void block_backward(uint32_t layer, const void* weights, const int32_t* document_begins,
                      const void* x, void* dy, float* sums, bool first) const override;
  /// Works on a few tokens at a time: never tokens x vocabulary.
  double loss(const Head& head, const float* x, const int32_t* targets, float scale,
              float* dx) const;
  void loss(const Head& head, const void* x, const int32_t* targets, float scale, void* dx,
            double* total) const override;
  const Kernels& kernels() const { return kernels_; }
  const ModelShape& model() const { return model_; }

  /// Test hook: final-norm hidden states to logits, [tokens, vocabulary].
  void logits(const Head& head, const float* x, float* out) const;

 private:
  struct Block;  ///< recomputed activations of a block, in scratch, and its documents
  WeightView view(const void* weights, const LayerTensor& tensor) const;
  void attention_forward(const LayerShape& shape, const void* weights, const float* x,
                         Block& b) const;
  void mlp_forward(const LayerShape& shape, const void* weights, Block& b) const;
  void mlp_backward(const LayerShape& shape, const void* weights, float* dy, float* sums,
                    bool first, Block& b) const;
  void attention_backward(const LayerShape& shape, const void* weights, const float* x, float* dy,
                          float* sums, bool first, Block& b) const;
  Block carve(bool backward, const int32_t* document_begins) const;
  /// Zeroes what no kernel sums into.
  void zero_untrained(const LayerShape& shape, float* sums) const;
  /// dW (+)= dout^T in, unless the tensor is frozen.
  void weight_gradient(const LayerTensor& tensor, const float* dout, const float* in, float* sums,
                       bool first) const;
  /// dx += the norm's gradient, and that of its weight unless it is frozen.
  void norm_gradient(const LayerTensor& tensor, const void* weights, const float* x,
                     const float* rstd, const float* dy, float* dx, float* sums, bool first) const;
  LinearShape linear_shape(const LayerTensor& tensor) const;
  WeightView output_projection(const Head& head) const;
  uint64_t loss_rows() const;

  ModelShape model_;
  DType type_;
  BatchShape batch_;
  const Kernels& kernels_;
  uint64_t table_bytes_ = 0;
  uint64_t buffer_bytes_ = 0;  ///< of all calls' buffers, besides the table and the threads'
  float* table_ = nullptr;
  KernelScratch thread_scratch_;
  std::byte* buffers_ = nullptr;
};

}  // namespace overspill
