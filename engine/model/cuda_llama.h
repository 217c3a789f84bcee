// The Llama family's layers on a GPU: kernels, cuBLASLt's products and cuDNN's attention, put on
// the compute stream one behind the other. Buffers of one call are used again by the next; the
// stream's order is all that this needs. T is the storage of weights and activations, float or
// __nv_bfloat16; sums are float32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <memory>

#include "engine/model/cuda_attention_choice.h"
#include "engine/model/cuda_gemm.h"
#include "engine/model/cuda_scratch.h"
#include "engine/model/model.h"
#include "offload/cuda_device.h"

namespace overspill::cuda {

template <class T>
class CudaLlama final : public Model {
 public:
  CudaLlama(const ModelShape& model, const BatchShape& batch);

  uint64_t scratch_bytes() const override;
  DType activation_type() const override { return kType; }
  void attach(Device& device, std::byte* scratch) override;

  void embed(const void* weights, const int32_t* tokens, void* y) const override;
  void embed_backward(const int32_t* tokens, const void* dy, float* sums,
                      bool first) const override;
  void block(uint32_t layer, const void* weights, const int32_t* document_begins, const void* x,
             void* y) const override;
  void block_backward(uint32_t layer, const void* weights, const int32_t* document_begins,
                      const void* x, void* dy, float* sums, bool first) const override;
  void loss(const Head& head, const void* x, const int32_t* targets, float scale, void* dx,
            double* total) const override;

 private:
  static constexpr DType kType = sizeof(T) == 2 ? DType::bf16 : DType::f32;
  static constexpr GemmTypes kActivations{kType, kType}, kSums{kType, DType::f32};
  struct Backward;  ///< what the parts of a block's backward share

  cudaStream_t stream() const;
  const T* view(const void* weights, const LayerTensor& tensor) const;
  LinearShape linear_shape(const LayerTensor& tensor) const;
  LinearShape head_shape(uint64_t rows) const;
  AttentionShape attention_shape() const;
  void plan_products();
  uint64_t workspace_bytes() const;

  void project(cudaStream_t stream, const LayerTensor& tensor, const void* weights,
               const std::byte* x, void* y, const void* addend = nullptr) const;
  void rotate(cudaStream_t stream, bool inverse, std::byte* q, std::byte* k) const;
  /// The documents' begins on the GPU, and their ends beside them; null for null.
  const int32_t* copy_documents(const int32_t* document_begins) const;
  typename AttentionChoice<T>::Tensors attention_tensors(const int32_t* document_begins) const;
  void attention_forward(cudaStream_t stream, const LayerShape& shape, const void* weights,
                         const int32_t* document_begins, const T* x) const;
  void mlp_forward(cudaStream_t stream, const LayerShape& shape, const void* weights) const;
  void mlp_backward(const Backward& b) const;
  void attention_backward(const Backward& b, const T* x) const;
  void norm_gradient(const Backward& b, const LayerTensor& tensor, const T* x,
                     const float* rstd) const;
  void head_backward(cudaStream_t stream, const Head& head, const T* x, uint64_t rows,
                     bool accumulate, T* dx) const;
  void zero_untrained(cudaStream_t stream, const Head& head) const;
  const T* output_projection(const Head& head) const;

  const ModelShape model_;
  BatchShape batch_;
  CudaDevice* device_ = nullptr;
  CudaScratch scratch_{};
  std::unique_ptr<GemmPlans> products_;
  AttentionChoice<T> attention_;
};

}  // namespace overspill::cuda
