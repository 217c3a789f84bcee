// cuDNN fuses a graph into one kernel only when it has a form it knows: operations, their order and
// the strides of tensors between them are those that its documentation gives for attention.
#include "engine/model/cuda_dnn_attention_graph.h"

namespace overspill::cuda {
namespace {

constexpr cudnnDataType_t kBf16 = CUDNN_DATA_BFLOAT16, kFloat = CUDNN_DATA_FLOAT,
                          kInt = CUDNN_DATA_INT32, kBool = CUDNN_DATA_BOOLEAN;
constexpr int64_t kRow = 2, kColumn = 3;  // axes of the scores

int64_t extent(uint64_t value) { return static_cast<int64_t>(value); }

/// The shapes of all tensors.
struct Shapes {
  explicit Shapes(const DnnAttentionPart& part)
      : b(extent(part.part.batch)),
        s(extent(part.part.sequence_len)),
        h(part.part.heads),
        k(part.part.kv_heads),
        d(part.part.head_dim),
        all_h(part.whole.heads),
        all_k(part.whole.kv_heads) {}

  DnnTensorShape queries() const { return {{b, h, s, d}, {s * all_h * d, d, all_h * d, 1}}; }
  DnnTensorShape keys() const { return {{b, k, s, d}, {s * all_k * d, d, all_k * d, 1}}; }
  DnnTensorShape keys_transposed() const {
    return {{b, k, d, s}, {s * all_k * d, d, 1, all_k * d}};
  }
  DnnTensorShape lse() const { return {{b, h, s, 1}, {all_h * s, s, 1, 1}}; }
  DnnTensorShape rows() const { return {{b, h, s, 1}, {h * s, s, 1, 1}}; }
  DnnTensorShape scores() const { return {{b, h, s, s}, {h * s * s, s * s, s, 1}}; }
  DnnTensorShape scores_transposed() const { return {{b, h, s, s}, {h * s * s, s * s, 1, s}}; }
  DnnTensorShape columns() const { return {{b, 1, 1, s}, {s, s, s, 1}}; }
  DnnTensorShape heads() const { return {{b, h, s, d}, {h * s * d, s * d, d, 1}}; }

  int64_t b, s, h, k, d;
  int64_t all_h, all_k;
};

class Builder {
 public:
  Builder(const DnnLibrary& library, const DnnAttentionPart& part)
      : graph(library),
        shapes(part),
        windowed(part.windowed),
        documents(part.documents),
        q(graph.memory(kIdQ, kBf16, shapes.queries())),
        kt(graph.memory(kIdK, kBf16, shapes.keys_transposed())),
        scale(graph.number(kIdScale, kFloat)),
        masked(graph.number(kIdMasked, kFloat)) {}

  DnnTensor scores(cudnnDataType_t type = kFloat) { return graph.between(type, shapes.scores()); }
  DnnTensor rows() { return graph.between(kFloat, shapes.rows()); }

  DnnTensor to(DnnTensor y, const DnnGraph::Pointwise& operation) {
    graph.pointwise(operation, y);
    return y;
  }
  DnnTensor scaled_scores() {
    const DnnTensor product = scores();
    graph.matmul(q, kt, product);
    return to(scores(), {.mode = CUDNN_POINTWISE_MUL, .x = product, .b = scale});
  }
  /// Keeps row >= column.
  DnnTensor causal(DnnTensor x) {
    const DnnTensor row =
        to(scores(kInt), {.mode = CUDNN_POINTWISE_GEN_INDEX, .x = x, .axis = kRow});
    const DnnTensor column =
        to(scores(kInt), {.mode = CUDNN_POINTWISE_GEN_INDEX, .x = x, .axis = kColumn});
    const DnnTensor kept = to(
        scores(kBool), {.mode = CUDNN_POINTWISE_CMP_GE, .x = row, .b = column, .precision = kBool});
    return to(scores(), {.mode = CUDNN_POINTWISE_BINARY_SELECT, .x = x, .b = masked, .mask = kept});
  }
  /// Keeps column + window > row.
  DnnTensor window(DnnTensor x) {
    const DnnTensor size = graph.number(kIdWindow, kFloat);
    const DnnTensor row = to(scores(), {.mode = CUDNN_POINTWISE_GEN_INDEX, .x = x, .axis = kRow});
    const DnnTensor column =
        to(scores(), {.mode = CUDNN_POINTWISE_GEN_INDEX, .x = x, .axis = kColumn});
    const DnnTensor end =
        to(scores(), {.mode = CUDNN_POINTWISE_ADD, .x = column, .b = size, .axis = kColumn});
    const DnnTensor kept =
        to(scores(kBool), {.mode = CUDNN_POINTWISE_CMP_GT, .x = end, .b = row, .precision = kBool});
    return to(scores(), {.mode = CUDNN_POINTWISE_BINARY_SELECT, .x = x, .b = masked, .mask = kept});
  }
  /// Keeps row < where the column's document ends. Before sm_90 cuDNN has no kernels for a number
  /// of each row, such as where its document begins.
  DnnTensor document(DnnTensor x) {
    const DnnTensor ends = graph.memory(kIdDocumentEnds, kInt, shapes.columns());
    const DnnTensor row =
        to(scores(kInt), {.mode = CUDNN_POINTWISE_GEN_INDEX, .x = x, .axis = kRow});
    const DnnTensor kept = to(
        scores(kBool), {.mode = CUDNN_POINTWISE_CMP_LT, .x = row, .b = ends, .precision = kBool});
    return to(scores(), {.mode = CUDNN_POINTWISE_BINARY_SELECT, .x = x, .b = masked, .mask = kept});
  }
  DnnTensor mask(DnnTensor x) {
    DnnTensor kept = causal(x);
    if (windowed) kept = window(kept);
    return documents ? document(kept) : kept;
  }
  /// The gradient of keys or values, summed over the query heads that share one.
  void key_gradient(DnnTensor weights, DnnTensor x, DnnTensor gradient) {
    const DnnTensor transposed = graph.between(kBf16, shapes.scores_transposed());
    graph.reshape(weights, transposed);
    if (shapes.h == shapes.k) return graph.matmul(transposed, x, gradient);
    const DnnTensor per_head = graph.between(kBf16, shapes.heads());
    graph.matmul(transposed, x, per_head);
    graph.reduce(CUDNN_REDUCE_TENSOR_ADD, per_head, gradient);
  }

  DnnGraph graph;
  Shapes shapes;
  bool windowed, documents;
  DnnTensor q, kt, scale, masked;
};

}  // namespace

DnnGraph attention_graph(const DnnLibrary& library, const DnnAttentionPart& part) {
  Builder build(library, part);
  DnnGraph& graph = build.graph;
  const DnnTensor v = graph.memory(kIdV, kBf16, build.shapes.keys());
  const DnnTensor o = graph.memory(kIdO, kBf16, build.shapes.queries());
  const DnnTensor lse = graph.memory(kIdLse, kFloat, build.shapes.lse());

  const DnnTensor x = build.mask(build.scaled_scores());
  const DnnTensor maximum = build.rows();
  graph.reduce(CUDNN_REDUCE_TENSOR_MAX, x, maximum);
  const DnnTensor below =
      build.to(build.scores(), {.mode = CUDNN_POINTWISE_SUB, .x = x, .b = maximum});
  const DnnTensor e = build.to(build.scores(), {.mode = CUDNN_POINTWISE_EXP, .x = below});
  const DnnTensor sum = build.rows();
  graph.reduce(CUDNN_REDUCE_TENSOR_ADD, e, sum);
  const DnnTensor log = build.to(build.rows(), {.mode = CUDNN_POINTWISE_LOG, .x = sum});
  build.to(lse, {.mode = CUDNN_POINTWISE_ADD, .x = maximum, .b = log});
  const DnnTensor p =
      build.to(build.scores(kBf16), {.mode = CUDNN_POINTWISE_DIV, .x = e, .b = sum});
  graph.matmul(p, v, o);
  return std::move(graph);
}

DnnGraph attention_gradient_graph(const DnnLibrary& library, const DnnAttentionPart& part,
                                  bool deterministic) {
  Builder build(library, part);
  DnnGraph& graph = build.graph;
  const Shapes& shapes = build.shapes;
  const DnnTensor vt = graph.memory(kIdV, kBf16, shapes.keys_transposed());
  const DnnTensor o = graph.memory(kIdO, kBf16, shapes.queries());
  const DnnTensor lse = graph.memory(kIdLse, kFloat, shapes.lse());
  const DnnTensor d_o = graph.memory(kIdDO, kBf16, shapes.queries());
  const DnnTensor dq = graph.memory(kIdDQ, kBf16, shapes.queries());
  const DnnTensor dk = graph.memory(kIdDK, kBf16, shapes.keys());
  const DnnTensor dv = graph.memory(kIdDV, kBf16, shapes.keys());
  const DnnTensor row_sums = graph.memory(kIdRowSums, kFloat, shapes.rows());
  const DnnTensor one = graph.number(kIdOne, kFloat);

  // The sum over a row of p * dp is that over the head of o * d_o. Its factor is where dropout's
  // would be.
  const DnnTensor products = build.to(graph.between(kFloat, shapes.heads()),
                                      {.mode = CUDNN_POINTWISE_MUL, .x = d_o, .b = o});
  const DnnTensor sums = build.rows();
  graph.reduce(CUDNN_REDUCE_TENSOR_ADD, products, sums);
  build.to(row_sums, {.mode = CUDNN_POINTWISE_MUL, .x = sums, .b = one});

  const DnnTensor log_p =
      build.to(build.scores(), {.mode = CUDNN_POINTWISE_SUB, .x = build.scaled_scores(), .b = lse});
  const DnnTensor p =
      build.to(build.scores(), {.mode = CUDNN_POINTWISE_EXP, .x = build.mask(log_p)});
  build.key_gradient(p, d_o, dv);

  const DnnTensor dp = build.scores();
  graph.matmul(d_o, vt, dp);
  const DnnTensor centered =
      build.to(build.scores(), {.mode = CUDNN_POINTWISE_SUB, .x = dp, .b = row_sums});
  const DnnTensor weighted =
      build.to(build.scores(), {.mode = CUDNN_POINTWISE_MUL, .x = centered, .b = p});
  const DnnTensor dx =
      build.to(build.scores(), {.mode = CUDNN_POINTWISE_MUL, .x = weighted, .b = build.scale});
  build.key_gradient(dx, build.q, dk);

  const DnnTensor keys = graph.between(kFloat, shapes.keys());
  graph.reshape(build.kt, keys);
  if (deterministic) {
    graph.matmul(dx, keys, dq);
  } else {
    const DnnTensor sums_of_dq = graph.memory(kIdSums, kFloat, shapes.heads());
    graph.matmul(dx, keys, sums_of_dq);
    build.to(dq, {.mode = CUDNN_POINTWISE_IDENTITY, .x = sums_of_dq});
  }
  return std::move(graph);
}

}  // namespace overspill::cuda
