// The peers' orders of ops. Loads are emitted one layer ahead, because lanes are FIFO.
#include "bench/peers/schedules.h"

#include <algorithm>
#include <iterator>
#include <vector>

namespace overspill {
namespace {

constexpr uint64_t kBf16 = 2, kFloat = 4;
constexpr uint64_t kGroup = 100'000'000;  // parameters of one update

/// Buffers filled in turn.
class Buffers {
 public:
  explicit Buffers(size_t count) : count_(count) {}
  /// What must have ended before the next one can be filled.
  OpId free() const { return users_.size() < count_ ? OpId{} : users_[users_.size() - count_]; }
  void use(OpId last) { users_.push_back(last); }

 private:
  size_t count_;
  std::vector<OpId> users_;
};

/// Parameters of one rank's tensors of a layer, in the forward's order, as Megatron fuses them.
std::vector<uint64_t> fused_tensors(const Layout& layout, uint32_t layer) {
  const std::vector<LayerTensor>& t = layout.model.layers[layer].tensors;
  const auto part = [&](std::initializer_list<uint32_t> fused) {
    uint64_t elements = 0;
    for (const uint32_t i : fused) elements += t[i].elements;
    return elements / layout.options.ranks;
  };
  switch (layout.model.layers[layer].kind) {
    case LayerKind::embedding: return {part({0})};
    case LayerKind::head: return {part({kOutput})};
    case LayerKind::block: break;
  }
  return {part({kQuery, kKey, kValue}), part({kAttentionOut}), part({kGate, kUp}), part({kDown})};
}

/// A layer's turn on the compute lane.
struct Visit {
  OpKind kind;
  uint32_t layer;
  bool last_micro_batch;
};

class Schedule {
 public:
  explicit Schedule(const Layout& layout) : layout_(layout) {
    program_.kind.micro_batches = layout.options.micro_batches;
  }

 protected:
  OpId add(OpKind kind, Lane lane, uint32_t layer, uint64_t work,
           std::initializer_list<OpId> after) {
    Op op{.kind = kind, .lane = lane, .layer = layer, .work = work};
    op.first_dep = static_cast<uint32_t>(program_.deps.size());
    std::ranges::copy_if(after, std::back_inserter(program_.deps), &OpId::valid);
    op.dep_count = static_cast<uint32_t>(program_.deps.size()) - op.first_dep;
    program_.ops.push_back(op);
    return {static_cast<uint32_t>(program_.ops.size()) - 1};
  }

  OpId compute(const Visit& visit, OpId weights) {
    const PlanOptions& o = layout_.options;
    const auto flops = visit.kind == OpKind::forward ? forward_flops : backward_flops;
    return add(visit.kind, Lane::compute, visit.layer,
               flops(layout_.model, visit.layer, o.micro_batch_tokens, o.sequence_len), {weights});
  }

  /// Micro-batch-major: all layers up and down for one micro-batch, then the next.
  std::vector<Visit> visits() const {
    std::vector<Visit> all;
    const uint32_t head = layout_.model.head(), count = layout_.options.micro_batches;
    for (uint32_t mb = 0; mb < count; ++mb) {
      const bool last = mb + 1 == count;
      for (uint32_t l = 0; l < head; ++l) all.push_back({OpKind::forward, l, last});
      all.push_back({OpKind::loss, head, last});
      for (uint32_t l = head; l-- > 0;) all.push_back({OpKind::backward, l, last});
    }
    return all;
  }

  const Layout& layout_;
  Program program_;
};

class DeepSpeed : Schedule {
 public:
  DeepSpeed(const Layout& layout, uint32_t buffers)
      : Schedule(layout),
        buffers_(buffers),
        groups_(deepspeed_groups(layout)),
        capacity_(std::ranges::max(groups_)) {}

  Program plan() {
    const std::vector<Visit> all = visits();
    OpId weights = gather(all[0].layer);
    for (size_t i = 0; i < all.size(); ++i) {
      const OpId done = compute(all[i], weights);
      weights_.use(done);
      if (i + 1 < all.size()) weights = gather(all[i + 1].layer);
      if (all[i].kind != OpKind::forward) export_gradients(all[i], done);
    }
    flush();
    update();
    return std::move(program_);
  }

 private:
  uint64_t peers_bytes(uint32_t layer) const {
    return kBf16 * (layout_.options.ranks - 1) * layout_.shard(layer);
  }

  OpId gather(uint32_t layer) {
    return add(OpKind::all_gather, Lane::collective, layer, peers_bytes(layer), {weights_.free()});
  }

  void export_gradients(const Visit& visit, OpId computed) {
    const OpId sum = add(OpKind::reduce_scatter, Lane::collective, visit.layer,
                         peers_bytes(visit.layer), {computed, sums_.free()});
    std::vector<uint64_t> tensors = fused_tensors(layout_, visit.layer);
    std::ranges::reverse(tensors);
    for (const uint64_t n : tensors) {
      if (visit.last_micro_batch && filled_ + n > capacity_) next_buffer();
      copied_ = add(OpKind::copy_to_host, Lane::d2h, visit.layer, kBf16 * n, {sum, all_written_});
      if (visit.last_micro_batch) filled_ += n;
    }
    sums_.use(copied_);
  }

  void next_buffer() {
    flush();
    if (++used_ < buffers_) return;
    used_ = 0;
    all_written_ = written_;
  }

  void flush() {
    written_ = add(OpKind::write, Lane::nvme_write, 1, kFloat * filled_, {copied_});
    filled_ = 0;
  }

  void update() {
    Buffers under_way(2);
    for (const uint64_t n : groups_) {
      const OpId read =
          add(OpKind::read, Lane::nvme_read, 1, 4 * kFloat * n, {written_, under_way.free()});
      const OpId updated = add(OpKind::update, Lane::optimizer, 1, n, {read});
      under_way.use(add(OpKind::write, Lane::nvme_write, 1, 3 * kFloat * n, {updated}));
      add(OpKind::copy_to_device, Lane::h2d, 1, kBf16 * n, {updated});
    }
  }

  const uint32_t buffers_;
  const std::vector<uint64_t> groups_;
  const uint64_t capacity_;  ///< parameters of a buffer
  Buffers weights_{2}, sums_{2};
  uint64_t filled_ = 0;  ///< of the current buffer
  uint32_t used_ = 0;
  OpId copied_, written_, all_written_;
};

class LoHan : Schedule {
 public:
  using Schedule::Schedule;

  Program plan() {
    const std::vector<Visit> all = visits();
    OpId loaded = load(all[0]);
    for (size_t i = 0; i < all.size(); ++i) {
      const OpId done = compute(all[i], loaded);
      weights_.use(done);
      if (i + 1 < all.size()) loaded = load(all[i + 1]);
      if (all[i].kind == OpKind::forward) {
        add(OpKind::copy_to_host, Lane::d2h, all[i].layer, activation_bytes(), {done});
      } else {
        update(all[i].layer, done);
      }
    }
    return std::move(program_);
  }

 private:
  uint64_t activation_bytes() const {
    return kBf16 * layout_.options.micro_batch_tokens * layout_.model.config.hidden_size;
  }

  /// Weights, and for a backward the layer's input.
  OpId load(const Visit& visit) {
    const uint64_t bytes = kBf16 * layout_.shard(visit.layer);
    const OpId read = add(OpKind::read, Lane::nvme_read, visit.layer, bytes, {stages_.free()});
    const uint64_t input = visit.kind == OpKind::backward ? activation_bytes() : 0;
    const OpId copy =
        add(OpKind::copy_to_device, Lane::h2d, visit.layer, bytes + input, {read, weights_.free()});
    stages_.use(copy);
    return copy;
  }

  void update(uint32_t layer, OpId computed) {
    for (uint64_t left = layout_.shard(layer); left > 0;) {
      const uint64_t n = std::min(kGroup, left);
      left -= n;
      const OpId gradient = add(OpKind::copy_to_host, Lane::d2h, layer, kBf16 * n, {computed});
      const OpId state =
          add(OpKind::read, Lane::nvme_read, layer, 3 * kFloat * n, {states_.free()});
      const OpId updated = add(OpKind::update, Lane::optimizer, layer, n, {state, gradient});
      states_.use(add(OpKind::write, Lane::nvme_write, layer, (3 * kFloat + kBf16) * n, {updated}));
    }
  }

  Buffers stages_{2}, weights_{2}, states_{4};
};

}  // namespace

Layout peer_layout(const ModelShape& model, const PlanOptions& options) {
  Layout layout;
  layout.model = model;
  layout.options = options;
  return layout;
}

std::vector<uint64_t> deepspeed_groups(const Layout& layout) {
  std::vector<uint64_t> groups{0};
  for (uint32_t l = 0; l <= layout.model.head(); ++l) {
    for (const uint64_t n : fused_tensors(layout, l)) {
      if (groups.back() >= kGroup) groups.push_back(0);
      groups.back() += n;
    }
  }
  return groups;
}

Program deepspeed_step(const Layout& layout, uint32_t buffers) {
  return DeepSpeed(layout, buffers).plan();
}
Program lohan_step(const Layout& layout) { return LoHan(layout).plan(); }

}  // namespace overspill
