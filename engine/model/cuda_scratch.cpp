// One pass over the buffers, which measures or cuts.
#include "engine/model/cuda_scratch.h"

#include <algorithm>

#include "engine/base/units.h"
#include "optim/factored_moment.h"

namespace overspill {
namespace {

constexpr uint64_t kLossChunkBytes = uint64_t{256} << 20;
constexpr uint64_t kMostLossRows = 1024;
/// Of sums of squares: as many parts as the kernels make at most (cuda_reduction.cu).
constexpr uint64_t kSquareParts = 1024, kRowParts = 32;

class Cutter {
 public:
  explicit Cutter(std::byte* memory) : memory_(memory) {}
  template <class T>
  void cut(T*& buffer, uint64_t bytes) {
    buffer = memory_ == nullptr ? nullptr : reinterpret_cast<T*>(memory_ + used_);
    used_ += round_up(bytes, 256);
    most_ = std::max(most_, used_);
  }
  uint64_t used() const { return used_; }
  void go_back(uint64_t used) { used_ = used; }
  uint64_t most() const { return most_; }

 private:
  std::byte* memory_;
  uint64_t used_ = 0, most_ = 0;
};

/// Elements of Adafactor's moments: of the largest matrix, and of the layer that has most; and the
/// columns of the widest matrix.
struct FactoredElements {
  uint64_t matrix = 0, layer = 0, columns = 0;
  explicit FactoredElements(const ModelShape& model) {
    for (const LayerShape& shape : model.layers) {
      uint64_t of_layer = 0;
      for (const LayerTensor& tensor : shape.tensors) {
        if (tensor.shape.size() != 2) continue;
        const FactoredMatrix m{.rows = tensor.shape[0], .columns = tensor.shape[1]};
        matrix = std::max(matrix, m.elements());
        columns = std::max(columns, m.columns);
        of_layer += m.elements();
      }
      layer = std::max(layer, of_layer);
    }
  }
};

}  // namespace

CudaScratch cut_cuda_scratch(const ModelShape& model, DType type, const BatchShape& batch,
                             uint64_t workspace_bytes, std::byte* memory) {
  const ModelConfig& c = model.config;
  const uint64_t n = batch.tokens(), width = dtype_bytes(type);
  const uint64_t d = n * c.hidden_size * width, f = n * c.intermediate_size * width;
  const uint64_t q = n * c.num_attention_heads * c.head_dim * width;
  const uint64_t kv = n * c.num_key_value_heads * c.head_dim * width;
  const uint64_t fitting = kLossChunkBytes / sizeof(float) / c.vocab_size / 16 * 16;
  CudaScratch s{};
  s.loss_rows = std::min(n, std::clamp<uint64_t>(fitting, 16, kMostLossRows));
  s.workspace_bytes = workspace_bytes;
  Cutter cutter(memory);
  cutter.cut(s.rotary, batch.sequence_len * c.head_dim * sizeof(float));
  cutter.cut(s.tokens, n * sizeof(int32_t));
  cutter.cut(s.targets, n * sizeof(int32_t));
  cutter.cut(s.document_begins, n * sizeof(int32_t));
  cutter.cut(s.document_ends, n * sizeof(int32_t));
  cutter.cut(s.total, sizeof(double));
  cutter.cut(s.workspace, workspace_bytes);
  const uint64_t shared = cutter.used();
  for (std::byte** buffer : {&s.norm1, &s.middle, &s.norm2, &s.d_norm}) cutter.cut(*buffer, d);
  for (std::byte** buffer : {&s.q, &s.attention, &s.d_attention, &s.dq}) cutter.cut(*buffer, q);
  for (std::byte** buffer : {&s.k, &s.v, &s.dk, &s.dv}) cutter.cut(*buffer, kv);
  for (std::byte** buffer : {&s.gate, &s.up, &s.act}) cutter.cut(*buffer, f);
  cutter.cut(s.rstd1, n * sizeof(float));
  cutter.cut(s.rstd2, n * sizeof(float));
  cutter.cut(s.lse, n * c.num_attention_heads * sizeof(float));
  cutter.go_back(shared);
  cutter.cut(s.logits, s.loss_rows * c.vocab_size * sizeof(float));
  cutter.cut(s.head_norm, s.loss_rows * c.hidden_size * width);
  cutter.cut(s.head_d_norm, s.loss_rows * c.hidden_size * width);
  cutter.cut(s.head_rstd, s.loss_rows * sizeof(float));
  cutter.cut(s.losses, n * sizeof(float));
  s.bytes = round_up(cutter.most(), 4096);
  return s;
}

CudaStateScratch cut_cuda_state_scratch(const ModelShape& model, std::byte* memory) {
  const FactoredElements factored(model);
  CudaStateScratch s{};
  s.workspace_bytes = std::max(kSquareParts, kRowParts * factored.columns) * sizeof(double);
  Cutter cutter(memory);
  cutter.cut(s.total, sizeof(double));
  cutter.cut(s.sums, factored.matrix * sizeof(double));
  cutter.cut(s.averages, factored.layer * sizeof(float));
  cutter.cut(s.workspace, s.workspace_bytes);
  s.bytes = round_up(cutter.most(), 4096);
  return s;
}

uint64_t cuda_scratch_bytes(const ModelShape& model, DType type, const BatchShape& batch) {
  constexpr uint64_t kGemm = uint64_t{32} << 20;
  const uint64_t pairs = batch.tokens() * batch.sequence_len * model.config.num_attention_heads;
  const uint64_t attention = type == DType::bf16 ? 2 * pairs : 0;
  const uint64_t workspace = std::max(kGemm, std::min(attention, kMostAttentionWorkspace));
  return cut_cuda_scratch(model, type, batch, workspace, nullptr).bytes +
         cut_cuda_state_scratch(model, nullptr).bytes;
}

}  // namespace overspill
