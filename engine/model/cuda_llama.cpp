// Composition of the GPU's kernels into layers, as llama.cpp composes the host's.
#include "engine/model/cuda_llama.h"

#include <algorithm>
#include <vector>

#include "engine/base/error.h"
#include "engine/base/units.h"
#include "engine/model/cuda_kernels.h"
#include "engine/model/cuda_model.h"
#include "engine/model/cuda_state.h"

namespace overspill::cuda {

template <class T>
struct CudaLlama<T>::Backward {
  cudaStream_t stream;
  const LayerShape& shape;
  const void* weights;
  const int32_t* document_begins;  ///< the GPU's, or null
  T* dy;                           ///< becomes dx
  float* sums;                     ///< null when all of the layer is frozen
  bool first;
  const CudaLlama& model;

  /// dW (+)= dout^T in, unless the tensor is frozen.
  void weight_gradient(const LayerTensor& tensor, const void* dout, const void* in) const {
    if (!tensor.trainable) return;
    float* const dw = sums + tensor.offset;
    model.products_->linear_weight_gradient(stream, model.linear_shape(tensor), kSums, dout, in, dw,
                                            first ? nullptr : dw);
  }
  void input_gradient(const LayerTensor& tensor, const void* dout, void* din, bool add) const {
    model.products_->linear_input_gradient(stream, model.linear_shape(tensor), kActivations, dout,
                                           model.view(weights, tensor), din, add ? din : nullptr);
  }
};

template <class T>
CudaLlama<T>::CudaLlama(const ModelShape& model, const BatchShape& batch)
    : model_(model),
      batch_(batch),
      products_(std::make_unique<GemmPlans>(open_blas_library(), kGemmWorkspaceBytes)),
      attention_(attention_shape(), batch.documents) {
  scratch_ = cut_cuda_scratch(model_, kType, batch_, 0, nullptr);
  plan_products();
  scratch_ = cut_cuda_scratch(model_, kType, batch_, workspace_bytes(), nullptr);
}

template <class T>
void CudaLlama<T>::plan_products() {
  for (const LayerTensor& tensor : model_.layers[1].tensors) {
    if (tensor.shape.size() != 2) continue;
    products_->prepare(GemmProduct::linear, linear_shape(tensor), kActivations);
    products_->prepare(GemmProduct::input_gradient, linear_shape(tensor), kActivations);
    products_->prepare(GemmProduct::weight_gradient, linear_shape(tensor), kSums);
  }
  for (const uint64_t rows : {scratch_.loss_rows, batch_.tokens() % scratch_.loss_rows}) {
    if (rows == 0) continue;
    products_->prepare(GemmProduct::linear, head_shape(rows), kSums);
    products_->prepare(GemmProduct::input_gradient, head_shape(rows), kActivations);
    products_->prepare(GemmProduct::weight_gradient, head_shape(rows), kSums);
  }
}

template <class T>
uint64_t CudaLlama<T>::workspace_bytes() const {
  const uint64_t n = batch_.tokens(), d = model_.config.hidden_size;
  uint64_t most =
      std::max({products_->workspace_bytes(), attention_.workspace_bytes(),
                embed_gradient_workspace_bytes(n), rms_norm_gradient_workspace_bytes(n, d)});
  return most;
}

template <class T>
uint64_t CudaLlama<T>::scratch_bytes() const {
  return scratch_.bytes;
}

template <class T>
void CudaLlama<T>::attach(Device& device, std::byte* scratch) {
  device_ = dynamic_cast<CudaDevice*>(&device);
  CHECK(device_ != nullptr && reinterpret_cast<uintptr_t>(scratch) % 256 == 0);
  scratch_ = cut_cuda_scratch(model_, kType, batch_, workspace_bytes(), scratch);
  products_->use_workspace(scratch_.workspace, scratch_.workspace_bytes);
  attention_.set_stream(stream());
  std::vector<float> table(batch_.sequence_len * model_.config.head_dim);
  rotary_table(model_.config, batch_.sequence_len, table.data());
  const std::span<const std::byte> bytes = std::as_bytes(std::span(table));
  device_->copy_to_device(reinterpret_cast<std::byte*>(scratch_.rotary), bytes.data(),
                          bytes.size());
}

template <class T>
cudaStream_t CudaLlama<T>::stream() const {
  return static_cast<cudaStream_t>(device_->native_stream(DeviceStream::compute));
}

template <class T>
const T* CudaLlama<T>::view(const void* weights, const LayerTensor& tensor) const {
  return static_cast<const T*>(weights) + tensor.offset;
}

template <class T>
LinearShape CudaLlama<T>::linear_shape(const LayerTensor& tensor) const {
  return {batch_.tokens(), tensor.shape[1], tensor.shape[0]};
}

template <class T>
LinearShape CudaLlama<T>::head_shape(uint64_t rows) const {
  return {rows, model_.config.hidden_size, model_.config.vocab_size};
}

template <class T>
AttentionShape CudaLlama<T>::attention_shape() const {
  const ModelConfig& c = model_.config;
  return {batch_.sequences, batch_.sequence_len, c.num_attention_heads, c.num_key_value_heads,
          c.head_dim};
}

template <class T>
T* as(std::byte* buffer) {
  return reinterpret_cast<T*>(buffer);
}

template <class T>
void CudaLlama<T>::embed(const void* weights, const int32_t* tokens, void* y) const {
  const uint64_t n = batch_.tokens();
  device_->enqueue_copy(DeviceStream::compute, reinterpret_cast<std::byte*>(scratch_.tokens),
                        reinterpret_cast<const std::byte*>(tokens), n * sizeof(int32_t));
  cuda::embed(stream(), scratch_.tokens, view(weights, model_.layers[0].tensors[0]),
              static_cast<T*>(y), n, model_.config.hidden_size);
}

template <class T>
void CudaLlama<T>::embed_backward(const int32_t* tokens, const void* dy, float* sums,
                                  bool first) const {
  const uint64_t n = batch_.tokens();
  device_->enqueue_copy(DeviceStream::compute, reinterpret_cast<std::byte*>(scratch_.tokens),
                        reinterpret_cast<const std::byte*>(tokens), n * sizeof(int32_t));
  if (first) fill_zero(stream(), sums, model_.layers[0].padded);
  embed_gradient(stream(), scratch_.tokens, static_cast<const T*>(dy), sums, scratch_.workspace, n,
                 model_.config.hidden_size);
}

template <class T>
void CudaLlama<T>::project(cudaStream_t stream, const LayerTensor& tensor, const void* weights,
                           const std::byte* x, void* y, const void* addend) const {
  products_->linear(stream, linear_shape(tensor), kActivations, x, view(weights, tensor), y,
                    addend);
}

template <class T>
void CudaLlama<T>::rotate(cudaStream_t stream, bool inverse, std::byte* q, std::byte* k) const {
  const AttentionShape s = attention_shape();
  cuda::rotate(stream, as<T>(q), scratch_.rotary, s.batch, s.sequence_len, s.heads, s.head_dim,
               inverse);
  cuda::rotate(stream, as<T>(k), scratch_.rotary, s.batch, s.sequence_len, s.kv_heads, s.head_dim,
               inverse);
}

template <class T>
const int32_t* CudaLlama<T>::copy_documents(const int32_t* document_begins) const {
  if (document_begins == nullptr) return nullptr;
  device_->enqueue_copy(
      DeviceStream::compute, reinterpret_cast<std::byte*>(scratch_.document_begins),
      reinterpret_cast<const std::byte*>(document_begins), batch_.tokens() * sizeof(int32_t));
  document_ends(stream(), scratch_.document_begins, scratch_.document_ends, batch_.sequences,
                batch_.sequence_len);
  return scratch_.document_begins;
}

template <class T>
typename AttentionChoice<T>::Tensors CudaLlama<T>::attention_tensors(
    const int32_t* document_begins) const {
  const CudaScratch& s = scratch_;
  return {as<T>(s.q), as<T>(s.k),      as<T>(s.v),     as<T>(s.attention),
          s.lse,      document_begins, s.document_ends};
}

template <class T>
void CudaLlama<T>::attention_forward(cudaStream_t stream, const LayerShape& shape,
                                     const void* weights, const int32_t* document_begins,
                                     const T* x) const {
  const auto& t = shape.tensors;
  const CudaScratch& s = scratch_;
  rms_norm(stream, x, view(weights, t[kInputNorm]), static_cast<float>(model_.config.rms_norm_eps),
           as<T>(s.norm1), s.rstd1, batch_.tokens(), model_.config.hidden_size);
  project(stream, t[kQuery], weights, s.norm1, s.q);
  project(stream, t[kKey], weights, s.norm1, s.k);
  project(stream, t[kValue], weights, s.norm1, s.v);
  rotate(stream, false, s.q, s.k);
  attention_.forward(attention_tensors(document_begins), s.workspace);
  project(stream, t[kAttentionOut], weights, s.attention, s.middle, x);
}

template <class T>
void CudaLlama<T>::mlp_forward(cudaStream_t stream, const LayerShape& shape,
                               const void* weights) const {
  const auto& t = shape.tensors;
  const CudaScratch& s = scratch_;
  rms_norm(stream, as<T>(s.middle), view(weights, t[kPostNorm]),
           static_cast<float>(model_.config.rms_norm_eps), as<T>(s.norm2), s.rstd2, batch_.tokens(),
           model_.config.hidden_size);
  project(stream, t[kGate], weights, s.norm2, s.gate);
  project(stream, t[kUp], weights, s.norm2, s.up);
  swiglu(stream, as<T>(s.gate), as<T>(s.up), as<T>(s.act),
         batch_.tokens() * model_.config.intermediate_size);
}

template <class T>
void CudaLlama<T>::block(uint32_t layer, const void* weights, const int32_t* document_begins,
                         const void* x, void* y) const {
  const LayerShape& shape = model_.layers[layer];
  const cudaStream_t on = stream();
  attention_forward(on, shape, weights, copy_documents(document_begins), static_cast<const T*>(x));
  mlp_forward(on, shape, weights);
  project(on, shape.tensors[kDown], weights, scratch_.act, y, scratch_.middle);
}

template <class T>
void CudaLlama<T>::norm_gradient(const Backward& b, const LayerTensor& tensor, const T* x,
                                 const float* rstd) const {
  rms_norm_gradient(b.stream, x, view(b.weights, tensor), rstd, as<T>(scratch_.d_norm), b.dy,
                    tensor.trainable ? b.sums + tensor.offset : nullptr, scratch_.workspace,
                    {.accumulate_dx = true, .accumulate_dw = !b.first}, batch_.tokens(),
                    model_.config.hidden_size);
}

template <class T>
void CudaLlama<T>::mlp_backward(const Backward& b) const {
  const auto& t = b.shape.tensors;
  const CudaScratch& s = scratch_;
  b.weight_gradient(t[kDown], b.dy, s.act);
  b.input_gradient(t[kDown], b.dy, s.act, false);
  swiglu_gradient(b.stream, as<T>(s.gate), as<T>(s.up), as<T>(s.act),
                  batch_.tokens() * model_.config.intermediate_size);
  b.weight_gradient(t[kGate], s.gate, s.norm2);
  b.weight_gradient(t[kUp], s.up, s.norm2);
  b.input_gradient(t[kGate], s.gate, s.d_norm, false);
  b.input_gradient(t[kUp], s.up, s.d_norm, true);
  norm_gradient(b, t[kPostNorm], as<T>(s.middle), s.rstd2);
}

template <class T>
void CudaLlama<T>::attention_backward(const Backward& b, const T* x) const {
  const auto& t = b.shape.tensors;
  const CudaScratch& s = scratch_;
  b.weight_gradient(t[kAttentionOut], b.dy, s.attention);
  b.input_gradient(t[kAttentionOut], b.dy, s.d_attention, false);
  attention_.backward(attention_tensors(b.document_begins),
                      {as<T>(s.d_attention), as<T>(s.dq), as<T>(s.dk), as<T>(s.dv)}, s.workspace);
  rotate(b.stream, true, s.dq, s.dk);
  b.weight_gradient(t[kQuery], s.dq, s.norm1);
  b.weight_gradient(t[kKey], s.dk, s.norm1);
  b.weight_gradient(t[kValue], s.dv, s.norm1);
  b.input_gradient(t[kQuery], s.dq, s.d_norm, false);
  b.input_gradient(t[kKey], s.dk, s.d_norm, true);
  b.input_gradient(t[kValue], s.dv, s.d_norm, true);
  norm_gradient(b, t[kInputNorm], x, s.rstd1);
}

template <class T>
void CudaLlama<T>::block_backward(uint32_t layer, const void* weights,
                                  const int32_t* document_begins, const void* input, void* gradient,
                                  float* sums, bool first) const {
  const T* const x = static_cast<const T*>(input);
  const Backward b{stream(),
                   model_.layers[layer],
                   weights,
                   copy_documents(document_begins),
                   static_cast<T*>(gradient),
                   sums,
                   first,
                   *this};
  for (const LayerShape::Range& gap : b.shape.untrained()) {
    if (first && sums != nullptr) fill_zero(b.stream, sums + gap.begin, gap.end - gap.begin);
  }
  attention_forward(b.stream, b.shape, weights, b.document_begins, x);
  mlp_forward(b.stream, b.shape, weights);
  mlp_backward(b);
  attention_backward(b, x);
}

template <class T>
const T* CudaLlama<T>::output_projection(const Head& head) const {
  if (head.embedding != nullptr) return view(head.embedding, model_.layers[0].tensors[0]);
  return view(head.weights, model_.layers.back().tensors[kOutput]);
}

template <class T>
void CudaLlama<T>::loss(const Head& head, const void* input, const int32_t* targets, float scale,
                        void* dx, double* total) const {
  const uint64_t n = batch_.tokens(), d = model_.config.hidden_size;
  const uint64_t vocabulary = model_.config.vocab_size;
  const CudaScratch& s = scratch_;
  const cudaStream_t on = stream();
  device_->enqueue_copy(DeviceStream::compute, reinterpret_cast<std::byte*>(s.targets),
                        reinterpret_cast<const std::byte*>(targets), n * sizeof(int32_t));
  zero_untrained(on, head);
  for (uint64_t row = 0; row < n; row += s.loss_rows) {
    const uint64_t rows = std::min(s.loss_rows, n - row);
    const T* const x = static_cast<const T*>(input) + row * d;
    rms_norm(on, x, view(head.weights, model_.layers.back().tensors[kFinalNorm]),
             static_cast<float>(model_.config.rms_norm_eps), as<T>(s.head_norm), s.head_rstd, rows,
             d);
    products_->linear(on, head_shape(rows), kSums, s.head_norm, output_projection(head), s.logits);
    cross_entropy(on, s.logits, s.targets + row, dx == nullptr ? 0.0f : scale, s.losses + row, rows,
                  vocabulary);
    if (dx == nullptr) continue;
    head_backward(on, head, x, rows, !(head.first && row == 0), static_cast<T*>(dx) + row * d);
  }
  sum(on, s.losses, n, s.total, false);
  device_->enqueue_copy(DeviceStream::compute, reinterpret_cast<std::byte*>(total),
                        reinterpret_cast<const std::byte*>(s.total), sizeof(double));
}

template <class T>
void CudaLlama<T>::zero_untrained(cudaStream_t stream, const Head& head) const {
  if (!head.first) return;
  const auto zero = [&](const LayerShape& layer, float* sums) {
    if (sums == nullptr) return;
    for (const LayerShape::Range& gap : layer.untrained()) {
      fill_zero(stream, sums + gap.begin, gap.end - gap.begin);
    }
  };
  zero(model_.layers.back(), head.sums);
  zero(model_.layers[0], head.embedding_sums);
}

template <class T>
void CudaLlama<T>::head_backward(cudaStream_t stream, const Head& head, const T* x, uint64_t rows,
                                 bool accumulate, T* dx) const {
  const CudaScratch& s = scratch_;
  const auto& tensors = model_.layers.back().tensors;
  const LinearShape shape = head_shape(rows);
  if constexpr (kType == DType::bf16) {
    float_to_bf16(stream, s.logits, reinterpret_cast<T*>(s.logits), rows * shape.out);
  }
  float* projection_sums = head.embedding_sums;
  if (head.embedding == nullptr && tensors[kOutput].trainable) {
    projection_sums = head.sums + tensors[kOutput].offset;
  }
  if (projection_sums != nullptr) {
    products_->linear_weight_gradient(stream, shape, kSums, s.logits, s.head_norm, projection_sums,
                                      accumulate ? projection_sums : nullptr);
  }
  products_->linear_input_gradient(stream, shape, kActivations, s.logits, output_projection(head),
                                   s.head_d_norm);
  const LayerTensor& norm = tensors[kFinalNorm];
  rms_norm_gradient(stream, x, view(head.weights, norm), s.head_rstd, as<T>(s.head_d_norm), dx,
                    norm.trainable ? head.sums + norm.offset : nullptr, s.workspace,
                    {.accumulate_dx = false, .accumulate_dw = accumulate}, rows, shape.in);
}

}  // namespace overspill::cuda

namespace overspill {

const char* cuda_model_absence() { return ""; }

std::unique_ptr<Model> make_cuda_model(const ModelShape& model, DType type, const BatchShape& batch,
                                       uint32_t gpu) {
  use_gpu(gpu);
  if (type == DType::bf16) return std::make_unique<cuda::CudaLlama<__nv_bfloat16>>(model, batch);
  return std::make_unique<cuda::CudaLlama<float>>(model, batch);
}

std::unique_ptr<StateMath> make_cuda_state_math(const ModelShape& model) {
  return std::make_unique<cuda::CudaStateMath>(model);
}

}  // namespace overspill
