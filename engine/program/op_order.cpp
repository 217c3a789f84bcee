// Counts ops by kind and layer.
#include "engine/program/op_order.h"

#include "engine/base/error.h"
#include "engine/program/contents.h"

namespace overspill {
namespace {

constexpr size_t kKinds = static_cast<size_t>(OpKind::agree) + 1;

bool passes_micro_batch(OpKind kind) {
  return kind == OpKind::forward || kind == OpKind::loss || kind == OpKind::score ||
         kind == OpKind::backward;
}

}  // namespace

OpOrder::OpOrder(const Program& program, const Layout& layout)
    : program_(program),
      layout_(layout),
      done_(kKinds, std::vector<uint32_t>(layout.model.layers.size())),
      reduced_(layout.model.layers.size()) {}

void OpOrder::require(bool condition, OpId id, const char* otherwise) const {
  if (!condition) refuse_op(program_, id, "{}", otherwise);
}

/// Micro-batches pass a layer in order, so that its sums are added in order; what takes the sums
/// comes after all of them, and after they are those of all ranks.
void OpOrder::check(OpId id, uint32_t sum_version) {
  const Op& op = program_.ops[id.value];
  uint32_t& done = done_[static_cast<size_t>(op.kind)][op.layer];
  if (passes_micro_batch(op.kind) && op.index != done) {
    refuse_op(program_, id, "micro-batch {} is next", done);
  }
  ++done;
  switch (op.kind) {
    case OpKind::reduce_scatter:
    case OpKind::all_reduce:
    case OpKind::reduce_gradient: check_reduced(id, op.layer, sum_version); break;
    case OpKind::agree:
      require(count(OpKind::reduce_gradient, op.layer) > 0, id, "gradients are not reduced");
      break;
    case OpKind::export_gradient:
      require(count(OpKind::reduce_gradient, op.layer) > 0, id, "gradients are not reduced");
      require(!agrees() || count(OpKind::agree, op.layer) > 0, id, "the ranks have not agreed");
      break;
    default: break;
  }
  // These leave a version of their own.
  if (op.kind == OpKind::reduce_scatter || op.kind == OpKind::all_reduce) {
    reduced_[op.layer] = sum_version + 1;
  }
}

void OpOrder::check_reduced(OpId id, uint32_t layer, uint32_t sum_version) const {
  const PlanOptions& o = layout_.options;
  const OpKind kind = program_.ops[id.value].kind;
  const uint32_t mb = program_.kind.micro_batches;
  require(count(OpKind::backward, layer) == mb || count(OpKind::loss, layer) == mb, id,
          "gradients are not complete");
  if (kind == OpKind::reduce_scatter) return;
  require(o.ranks == 1 || count(OpKind::reduce_scatter, layer) == 1, id,
          "gradients are not summed over the ranks");
  if (kind == OpKind::all_reduce) return;
  require(o.replicas == 1 || count(OpKind::all_reduce, layer) == 1, id,
          "gradients are not summed over the replicas");
  require(o.world() == 1 || reduced_[layer] == sum_version, id,
          "gradients are not summed over the ranks");
}

/// Every op that the step is made of was there.
void OpOrder::check_complete() const {
  const StepKind& kind = program_.kind;
  const ModelShape& model = layout_.model;
  const PlanOptions& o = layout_.options;
  const bool in_backward = o.update == UpdateTiming::in_backward;
  const bool backward = kind.forward && kind.backward;
  const bool updates = kind.pending_update || (in_backward && backward);
  for (uint32_t l = 0; l < model.layers.size(); ++l) {
    const bool head = l == model.head();
    const auto expect = [&](OpKind op, bool there, uint32_t times) {
      const uint32_t done = count(op, l);
      if (done == (there ? times : 0)) return;
      fail(ErrorCode::internal, "program verification: {} of layer {} is there {} times",
           op_name(op), l, done);
    };
    const uint32_t mb = kind.micro_batches;
    expect(OpKind::forward, kind.forward && !head, mb);
    expect(OpKind::score, kind.forward && !kind.backward && head, mb);
    expect(OpKind::loss, backward && head, mb);
    expect(OpKind::backward, backward && !head && l >= model.lowest_trainable(), mb);
    const bool sums = backward && model.layers[l].trainable();
    expect(OpKind::reduce_gradient, sums, 1);
    expect(OpKind::reduce_scatter, sums && o.ranks > 1, 1);
    expect(OpKind::all_reduce, sums && o.replicas > 1, 1);
    expect(OpKind::agree, sums && agrees(), 1);
    // With sharded weights, as often as they leave the ring.
    if (!o.gathers_weights()) expect(OpKind::all_gather, updates && layout_.gathers_updates(l), 1);
  }
}

}  // namespace overspill
