// What is chosen is logged once.
#include "engine/model/cuda_attention_choice.h"

#include <algorithm>

#include "engine/base/error.h"
#include "engine/base/log.h"
#include "engine/model/cuda_kernels.h"
#include "engine/model/cuda_scratch.h"

namespace overspill::cuda {

template <class T>
AttentionChoice<T>::AttentionChoice(const AttentionShape& shape, bool documents)
    : shape_(shape), documents_(documents) {
  std::string refusal = "it computes in bf16, and precision is float32";
  if (sizeof(T) == 2 && (library_ = open_dnn_library(refusal))) {
    handle_.emplace(*library_);
    DnnAttentionOptions options{.most_workspace_bytes = kMostAttentionWorkspace};
    plans_ = DnnAttention::make(DnnTarget(*handle_), shape, options, refusal);
    if (plans_ && documents) {
      options.documents = true;
      document_plans_ = DnnAttention::make(DnnTarget(*handle_), shape, options, refusal);
    }
  }
  if (plans_) log_info("attention: cuDNN {}, on tensor cores", library_->version());
  if (plans_ && (!documents || document_plans_)) return;
  if (shape.head_dim > kMaxHeadDim) {
    fail(
        ErrorCode::invalid_config,
        "heads of {} values on a GPU need cuDNN, and that is not used{}: {}; the kernel without it "
        "takes heads of up to {}",
        shape.head_dim, plans_ ? " with documents" : "", refusal, kMaxHeadDim);
  }
  log_info("attention{}: the portable kernel, without tensor cores; cuDNN is not used: {}",
           plans_ ? " of documents" : "", refusal);
}

template <class T>
uint64_t AttentionChoice<T>::workspace_bytes() const {
  const auto needed = [this](const std::optional<DnnAttention>& plans) {
    if (!plans) return attention_gradient_workspace_bytes(shape_);
    return std::max(plans->forward_workspace_bytes(), plans->backward_workspace_bytes());
  };
  return documents_ ? std::max(needed(plans_), needed(document_plans_)) : needed(plans_);
}

template <class T>
const std::optional<DnnAttention>& AttentionChoice<T>::plans(const Tensors& tensors) const {
  if (tensors.document_begins == nullptr) return plans_;
  CHECK(documents_);
  return document_plans_;
}

template <class T>
void AttentionChoice<T>::set_stream(cudaStream_t stream) {
  stream_ = stream;
  if (handle_) handle_->set_stream(stream);
}

template <class T>
void AttentionChoice<T>::forward(const Tensors& t, std::byte* workspace) const {
  if (const auto& by_dnn = plans(t)) {
    return by_dnn->forward(*handle_, {t.q, t.k, t.v, t.document_ends}, t.o, t.lse, workspace);
  }
  attention(stream_, shape_, t.document_begins, t.q, t.k, t.v, t.o, t.lse);
}

template <class T>
void AttentionChoice<T>::backward(const Tensors& t, const Gradients& g,
                                  std::byte* workspace) const {
  if (const auto& by_dnn = plans(t)) {
    return by_dnn->backward(*handle_, {t.q, t.k, t.v, t.document_ends},
                            {t.o, g.d_o, t.lse, g.dq, g.dk, g.dv}, workspace);
  }
  attention_gradient(stream_, shape_, t.document_begins, t.q, t.k, t.v, t.o, t.lse, g.d_o, g.dq,
                     g.dk, g.dv, workspace);
}

template class AttentionChoice<float>;
template class AttentionChoice<__nv_bfloat16>;

}  // namespace overspill::cuda
