// The schedule: emits a step's ops in order. Placement is the layout's; what is fetched when, into
// which slot, and what is written back is decided here and in the other parts of StepPlanner.
// Dependencies follow from the accesses (hazards.h).
#include "engine/plan/planner.h"

#include <array>

#include "engine/plan/step_planner.h"

namespace overspill {

Program StepPlanner::plan() {
  CHECK(kind_.micro_batches > 0 && kind_.micro_batches <= layout_.options.micro_batches);
  if (!kind_.forward) {
    for (uint32_t l = 0; l <= head(); ++l) plan_flush(l);
    return std::move(program_);
  }
  for (uint32_t l = 0; l < head(); ++l) plan_forward(l);
  plan_head();
  for (uint32_t l = head(); kind_.backward && l-- > lowest_;) plan_backward(l);
  finish_layer();
  return std::move(program_);
}

OpId StepPlanner::emit(OpKind kind, Lane lane, uint32_t layer, uint32_t index, uint64_t work,
                       std::initializer_list<Access> accesses) {
  return emit(kind, lane, layer, index, work, std::span(accesses.begin(), accesses.size()));
}

OpId StepPlanner::emit(OpKind kind, Lane lane, uint32_t layer, uint32_t index, uint64_t work,
                       std::span<const Access> accesses) {
  const bool loads =
      kind == OpKind::read || kind == OpKind::copy_to_device || kind == OpKind::all_gather;
  const std::vector<OpId> deps = hazards_.add(lane, accesses, kind == OpKind::read,
                                              kind == OpKind::write, loads ? load_gate_ : OpId{});
  Op op{kind, lane, layer, index, work};
  op.first_access = static_cast<uint32_t>(program_.accesses.size());
  op.access_count = static_cast<uint32_t>(accesses.size());
  op.first_dep = static_cast<uint32_t>(program_.deps.size());
  op.dep_count = static_cast<uint32_t>(deps.size());
  program_.accesses.insert(program_.accesses.end(), accesses.begin(), accesses.end());
  program_.deps.insert(program_.deps.end(), deps.begin(), deps.end());
  program_.ops.push_back(op);
  return {static_cast<uint32_t>(program_.ops.size()) - 1};
}

void StepPlanner::transfer(OpKind kind, uint32_t layer, uint32_t index,
                           std::span<const Access> accesses) {
  if (accesses.empty()) return;
  uint64_t bytes = 0;
  for (const Access& a : accesses) bytes += a.bytes;
  emit(kind, kind == OpKind::read ? Lane::nvme_read : Lane::nvme_write, layer, index, bytes,
       accesses);
}

void StepPlanner::copy(OpKind kind, PageId id, Location from, Location to) {
  const Page& p = page(id);
  emit(kind, kind == OpKind::copy_to_device ? Lane::h2d : Lane::d2h, p.layer, p.index, p.bytes,
       {access(from, id, AccessMode::read), access(to, id, AccessMode::write)});
}

uint64_t StepPlanner::flops(uint32_t layer) const {
  return forward_flops(layout_.model, layer, layout_.options.micro_batch_tokens,
                       layout_.options.sequence_len);
}

uint64_t StepPlanner::backward_flops(uint32_t layer) const {
  return overspill::backward_flops(layout_.model, layer, layout_.options.micro_batch_tokens,
                                   layout_.options.sequence_len);
}

void StepPlanner::plan_forward(uint32_t layer) {
  begin_layer();
  if (kind_.pending_update) {
    plan_pending_update(layer, {.for_compute = true, .writes = !twice(layer)});
  }
  const Location weights = weights_for_compute(layer);
  OpId last;
  for (uint32_t mb = 0; mb < kind_.micro_batches; ++mb) {
    std::vector<Access> touched = {layer_weights(weights, layer)};
    if (layer > 0) {
      const PageId input = layout_.activation(layer, mb);
      touched.push_back(access(activation(input, false, now(layer, mb)), input, AccessMode::read));
    }
    const PageId output = layout_.activation(layer + 1, mb);
    touched.push_back(access(activation(output, true, now(layer, mb)), output, AccessMode::write));
    last = emit(OpKind::forward, Lane::compute, layer, mb, flops(layer), touched);
  }
  end_layer(last);
}

Location StepPlanner::take_gradient_sum(uint32_t layer) {
  return layer == 0 && tied() ? Location{layout_.tied_gradient, 0} : gradients_.next();
}

Access StepPlanner::sums(Location at, uint32_t layer, bool first) const {
  return access(at, layout_.gradient_sum[layer], first ? AccessMode::write : AccessMode::update);
}

void StepPlanner::plan_head() {
  const uint32_t layer = head();
  begin_layer();
  if (kind_.pending_update) {
    plan_pending_update(layer, {.for_compute = true, .writes = !twice(layer)});
  }
  const Location weights = weights_for_compute(layer);
  const Location embedding = tied() ? weights_for_compute(0) : Location{};
  const bool trains = kind_.backward && trainable(layer);
  const Location sum = trains ? take_gradient_sum(layer) : Location{};
  OpId last;
  for (uint32_t mb = 0; mb < kind_.micro_batches; ++mb) {
    const PageId input = layout_.activation(layer, mb), gradient = layout_.activation_gradient(mb);
    std::vector<Access> touched = {
        layer_weights(weights, layer),
        access(activation(input, false, now(layer, mb)), input, AccessMode::read)};
    if (kind_.backward) {
      touched.push_back(
          access(activation(gradient, true, now(layer, mb)), gradient, AccessMode::write));
    }
    if (trains) touched.push_back(sums(sum, layer, mb == 0));
    if (tied()) touched.push_back(layer_weights(embedding, 0));
    if (tied() && kind_.backward && trainable(0)) {
      touched.push_back(sums({layout_.tied_gradient, 0}, 0, mb == 0));
    }
    last = emit(kind_.backward ? OpKind::loss : OpKind::score, Lane::compute, layer, mb,
                kind_.backward ? backward_flops(layer) : flops(layer), touched);
  }
  end_layer(last);
  if (trains) unfinished_ = {layer, sum};
}

void StepPlanner::plan_backward(uint32_t layer) {
  // A single weight slot cannot be refilled before updates in the backward have used it.
  const bool loads_first = !updates_in_backward() || layout_.prefetch_depth > 0;
  if (!loads_first) finish_layer();
  begin_layer();
  if (twice(layer)) plan_repeated_update(layer, layer > 0);
  const Location weights = layer > 0 ? weights_for_compute(layer) : Location{};
  finish_layer();
  const bool trains = trainable(layer);
  const Location sum = trains ? take_gradient_sum(layer) : Location{};
  const uint32_t stage = 2 * head() - layer;
  OpId last;
  for (uint32_t mb = 0; mb < kind_.micro_batches; ++mb) {
    const PageId gradient = layout_.activation_gradient(mb);
    const bool first = mb == 0 && !(layer == 0 && tied());
    const Location at = activation(gradient, false, now(stage, mb));
    if (layer == 0) {
      last = emit(OpKind::backward, Lane::compute, 0, mb, flops(0),
                  {access(at, gradient, AccessMode::read), sums(sum, 0, first)});
      continue;
    }
    const PageId input = layout_.activation(layer, mb);
    const Location x = activation(input, false, now(stage, mb));
    mark_dirty(gradient);
    std::vector<Access> touched = {layer_weights(weights, layer),
                                   access(x, input, AccessMode::read),
                                   access(at, gradient, AccessMode::update)};
    if (trains) touched.push_back(sums(sum, layer, first));
    last = emit(OpKind::backward, Lane::compute, layer, mb, backward_flops(layer), touched);
  }
  end_layer(last);
  if (trains) unfinished_ = {layer, sum};
}

void StepPlanner::finish_layer() {
  if (!unfinished_) return;
  const auto [layer, sum] = *unfinished_;
  unfinished_.reset();
  // Nothing waits for the head's weights: the loads of the layer below go first.
  if (layer == head() && twice(layer)) plan_repeated_update(layer, false);
  finish_gradient(layer, sum);
}

void StepPlanner::reduce_in_group(uint32_t layer, Location sum) {
  const PlanOptions& o = layout_.options;
  if (o.ranks == 1) return;
  emit(OpKind::reduce_scatter, Lane::collective, layer, 0,
       (o.ranks - 1) * layout_.shard(layer) * o.reduce_bytes(),
       {access(sum, layout_.gradient_sum[layer], AccessMode::update)});
}

void StepPlanner::reduce_over_ranks(uint32_t layer, Location sum) {
  const PlanOptions& o = layout_.options;
  const PageId id = layout_.gradient_sum[layer];
  const uint64_t part = layout_.shard(layer);
  const Location own{sum.slot, o.rank * part * sizeof(float)};
  reduce_in_group(layer, sum);
  if (o.replicas > 1) {
    emit(OpKind::all_reduce, Lane::collective, layer, 0,
         2 * (o.replicas - 1) * part * o.reduce_bytes() / o.replicas,
         {access(own, id, AccessMode::update, part * sizeof(float))});
  }
}

void StepPlanner::finish_gradient(uint32_t layer, Location sum) {
  const PlanOptions& o = layout_.options;
  const uint64_t part_bytes = layout_.shard(layer) * sizeof(float);
  reduce_over_ranks(layer, sum);
  const Access own{sum.slot, o.rank * part_bytes, part_bytes, layout_.gradient_sum[layer]};
  emit(OpKind::reduce_gradient, Lane::compute, layer, 0, layout_.trained_parameters(layer), {own});
  if (updates_in_backward() && o.world() > 1) {
    // No rank may update by numbers that another one found not to be finite.
    Access released = own;
    released.mode = AccessMode::update;
    emit(OpKind::agree, Lane::collective, layer, 0, 0, {released});
  }
  const UpdatePass pass{.for_compute = gathers_updates(layer),
                        .in_ring = find_ring(layer) != nullptr};
  for (uint32_t c = 0; c < layout_.chunk_count(layer); ++c) {
    if (layout_.chunk(layer, c).trainable()) export_gradient(layer, c, sum, pass);
  }
  if (updates_in_backward() && gathers_updates(layer)) share_update(layer, pass.in_ring);
}

void StepPlanner::export_gradient(uint32_t layer, uint32_t c, Location sum,
                                  const UpdatePass& pass) {
  const Chunk& chunk = layout_.chunk(layer, c);
  const PageId id = layout_.gradient(layer, c);
  const bool float32 = layout_.options.precision == Precision::float32;
  const Location at{sum.slot, chunk.begin * sizeof(float)};
  const Access source =
      access(at, layout_.gradient_sum[layer], AccessMode::read, chunk.parameters * sizeof(float));
  const auto cast_to = [&](Location to) {
    const uint64_t bytes = chunk.parameters * layout_.options.gradient_bytes();
    emit(OpKind::export_gradient, Lane::compute, layer, c, chunk.parameters,
         {source, access(to, id, AccessMode::write, bytes)});
  };
  if (updates_in_backward()) {
    // Float32 stays in place. The export is emitted all the same: the update waits for it, and so
    // for the reduction before it in its lane, which finds what is not finite.
    Location gradient = unified_ && !float32 ? stages_.next() : at;
    cast_to(gradient);
    if (!unified_ && !updates_on_device(layer)) {
      const Location stage = stages_.next();
      copy(OpKind::copy_to_host, id, gradient, stage);
      gradient = stage;
    }
    return plan_update(layer, c, access(gradient, id, AccessMode::read), pass);
  }
  const Tier tier = page(id).home;
  if (tier != Tier::nvme && (unified_ || tier == Tier::device)) return cast_to(home(id));
  if (unified_) {
    const Location stage = stages_.next();
    cast_to(stage);
    return transfer(OpKind::write, layer, c, std::array{access(stage, id, AccessMode::read)});
  }
  cast_to(at);
  const Location target = tier == Tier::host ? home(id) : stages_.next();
  copy(OpKind::copy_to_host, id, at, target);
  if (tier == Tier::nvme) {
    transfer(OpKind::write, layer, c, std::array{access(target, id, AccessMode::read)});
  }
}

Program plan_step(const Layout& layout, const StepKind& kind) {
  return StepPlanner(layout, kind).plan();
}

}  // namespace overspill
