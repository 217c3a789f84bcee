// What is chosen is logged once.
#include "engine/model/cuda_attention_choice.h"

#include <algorithm>

#include "engine/base/error.h"
#include "engine/base/log.h"
#include "engine/model/cuda_kernels.h"
#include "engine/model/cuda_scratch.h"

namespace overspill::cuda {

template <class T>
AttentionChoice<T>::AttentionChoice(const AttentionShape& shape) : shape_(shape) {
  std::string refusal = "it computes in bf16, and precision is float32";
  if (sizeof(T) == 2 && (library_ = open_dnn_library(refusal))) {
    handle_.emplace(*library_);
    plans_ = DnnAttention::make(DnnTarget(*handle_), shape,
                                {.most_workspace_bytes = kMostAttentionWorkspace}, refusal);
  }
  if (plans_) {
    log_info("attention: cuDNN {}, on tensor cores", library_->version());
    return;
  }
  if (shape.head_dim > kMaxHeadDim) {
    fail(ErrorCode::invalid_config,
         "heads of {} values on a GPU need cuDNN, and that is not used: {}; the kernel without it "
         "takes heads of up to {}",
         shape.head_dim, refusal, kMaxHeadDim);
  }
  log_info("attention: the portable kernel, without tensor cores; cuDNN is not used: {}", refusal);
}

template <class T>
uint64_t AttentionChoice<T>::workspace_bytes() const {
  if (!plans_) return attention_gradient_workspace_bytes(shape_);
  return std::max(plans_->forward_workspace_bytes(), plans_->backward_workspace_bytes());
}

template <class T>
void AttentionChoice<T>::set_stream(cudaStream_t stream) {
  stream_ = stream;
  if (handle_) handle_->set_stream(stream);
}

template <class T>
void AttentionChoice<T>::forward(const Tensors& t, std::byte* workspace) const {
  if (plans_) return plans_->forward(*handle_, {t.q, t.k, t.v}, t.o, t.lse, workspace);
  attention(stream_, shape_, t.q, t.k, t.v, t.o, t.lse);
}

template <class T>
void AttentionChoice<T>::backward(const Tensors& t, const Gradients& g,
                                  std::byte* workspace) const {
  if (plans_) {
    return plans_->backward(*handle_, {t.q, t.k, t.v}, {t.o, g.d_o, t.lse, g.dq, g.dk, g.dv},
                            workspace);
  }
  attention_gradient(stream_, shape_, t.q, t.k, t.v, t.o, t.lse, g.d_o, g.dq, g.dk, g.dv,
                     workspace);
}

template class AttentionChoice<float>;
template class AttentionChoice<__nv_bfloat16>;

}  // namespace overspill::cuda
