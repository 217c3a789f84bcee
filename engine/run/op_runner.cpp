// One function per kind of op. The meaning of each op's accesses is documented in planner.h.
#include "engine/run/op_runner.h"

#include <algorithm>
#include <cmath>

#include "engine/base/error.h"
#include "engine/program/dump.h"

namespace overspill {
namespace {

/// Whether two transfers share pages or memory.
bool overlap(std::span<const Channel::Segment> one, std::span<const Channel::Segment> two) {
  return std::ranges::any_of(one, [&](const Channel::Segment& a) {
    return std::ranges::any_of(two, [&](const Channel::Segment& b) {
      return (a.offset < b.offset + b.bytes && b.offset < a.offset + a.bytes) ||
             (a.memory < b.memory + b.bytes && b.memory < a.memory + a.bytes);
    });
  });
}

}  // namespace

OpRunner::OpRunner(PageStore& store, const StateMath& state, const Model* layers,
                   const RankGroups& ranks)
    : store_(store),
      layout_(store.layout()),
      state_(state),
      layers_(layers),
      ranks_(ranks),
      area_(layout_.options, layout_.model.layers.size()) {
  const PlanOptions& o = layout_.options;
  CHECK(o.ranks == 1 || (ranks_.shard != nullptr && ranks_.shard->size() == o.ranks));
  CHECK(o.replicas == 1 || (ranks_.replicas != nullptr && ranks_.replicas->size() == o.replicas));
  CHECK(o.world() == 1 || (ranks_.world != nullptr && ranks_.world->size() == o.world()));
}

template <class T>
T* OpRunner::at(const Access& access) const {
  return reinterpret_cast<T*>(store_.address(access.slot, access.offset));
}

std::span<float> OpRunner::floats(const Access& access) const {
  return {at<float>(access), access.bytes / sizeof(float)};
}

/// In the batch's slot, which devices with streams have.
template <class T>
T* OpRunner::batch_area(uint64_t offset) const {
  return reinterpret_cast<T*>(store_.address(layout_.batch, offset));
}

/// A micro-batch's tokens, targets or documents' begins where the model can take them; `given`:
/// they are there. Null where there are none.
const int32_t* OpRunner::batch_ids(std::span<const int32_t> ids, uint64_t offset,
                                   uint32_t micro_batch, bool given) const {
  if (ids.empty()) return nullptr;
  const uint64_t tokens = layout_.options.micro_batch_tokens, first = micro_batch * tokens;
  if (!layout_.options.streams) return ids.data() + first;
  auto* const pinned = batch_area<int32_t>(offset) + first;
  if (!given) std::copy_n(ids.data() + first, tokens, pinned);
  return pinned;
}

/// Where the model leaves a number of this step.
double* OpRunner::result(double& own, uint64_t offset) const {
  return layout_.options.streams ? batch_area<double>(offset) : &own;
}

void OpRunner::run(const Program& program, const Op& op, StepContext& context) {
  if (op.kind == OpKind::read || op.kind == OpKind::write) return finish_transfer(program, op);
  enqueue(program, op, context);
  finish(program, op, context);
}

std::optional<DeviceStream> OpRunner::stream_of(Lane lane) const {
  if (!layout_.options.streams) return std::nullopt;
  switch (lane) {
    case Lane::h2d: return DeviceStream::h2d;
    case Lane::d2h: return DeviceStream::d2h;
    case Lane::compute: return DeviceStream::compute;
    case Lane::collective:
      for (const Collective* group : {ranks_.shard, ranks_.replicas}) {
        if (group != nullptr && group->on_stream()) return DeviceStream::collective;
      }
      return std::nullopt;
    default: return std::nullopt;
  }
}

/// That moves an op's data between ranks.
Collective& OpRunner::group_of(const Op& op) const {
  return op.kind == OpKind::all_reduce ? *ranks_.replicas : *ranks_.shard;
}

void OpRunner::await(const Op& op, DeviceEvent& event) {
  if (op.lane != Lane::collective || on_host(op)) return event.synchronize();
  try {
    group_of(op).await([&] { return event.done(); });
  } catch (const Error& error) {
    abort(error.what());
    end_groups_on_stream();
    throw;
  }
}

/// A group's part on the stream ends with the thread that waits in it, and this one waits in no
/// other any more: what a group has there would keep the stream, and all that follows on others.
void OpRunner::end_groups_on_stream() {
  for (Collective* group : {ranks_.shard, ranks_.replicas}) {
    if (group == nullptr || !group->on_stream()) continue;
    try {
      group->await([] { return true; });
    } catch (const Error&) {  // the reason is known: it has just been aborted
    }
  }
}

bool OpRunner::needs_results(const Op& op) const {
  return op.kind == OpKind::update && layout_.options.update == UpdateTiming::in_backward;
}

void OpRunner::enqueue(const Program& program, const Op& op, StepContext& context) {
  const std::span<const Access> accesses = program.accesses_of(op);
  switch (op.kind) {
    case OpKind::read:
    case OpKind::write: break;
    case OpKind::copy_to_device:
    case OpKind::copy_to_host: return copy(accesses, op);
    case OpKind::forward: return run_forward(accesses, op, context);
    case OpKind::loss:
    case OpKind::score: return run_head(accesses, op, context);
    case OpKind::backward: return run_backward(accesses, op, context);
    case OpKind::reduce_gradient: return run_reduce(accesses, op, context);
    case OpKind::export_gradient: return run_export(accesses, op);
    case OpKind::update: return run_update(program, op, context);
    case OpKind::all_gather: return run_all_gather(accesses);
    case OpKind::reduce_scatter:
      return ranks_.shard->reduce_scatter(floats(accesses[0]), layout_.options.reduce_type);
    case OpKind::all_reduce:
      return ranks_.replicas->all_reduce(floats(accesses[0]), layout_.options.reduce_type);
    case OpKind::agree: return run_agree(op, context);
  }
  CHECK(false);  // of no stream
}

void OpRunner::finish(const Program&, const Op& op, StepContext& context) {
  if (op.kind == OpKind::loss || op.kind == OpKind::score) finish_loss(op, context);
  if (op.kind == OpKind::reduce_gradient) finish_reduce(op, context);
}

void OpRunner::copy(std::span<const Access> accesses, const Op& op) {
  auto *const from = at<std::byte>(accesses[0]), *const to = at<std::byte>(accesses[1]);
  const uint64_t bytes = accesses[0].bytes;
  if (const std::optional<DeviceStream> stream = stream_of(op.lane)) {
    return device().enqueue_copy(*stream, to, from, bytes);
  }
  if (op.kind == OpKind::copy_to_device) return device().copy_to_device(to, from, bytes);
  device().copy_to_host(to, from, bytes);
}

void OpRunner::abort(const std::string& reason) {
  for (Collective* collective : {ranks_.world, ranks_.shard, ranks_.replicas}) {
    if (collective != nullptr) collective->abort(reason);
  }
}

bool OpRunner::begin(const Program& program, const Op& op) {
  if (op.kind != OpKind::read && op.kind != OpKind::write) return false;
  Transfers& own = op.kind == OpKind::read ? reads_ : writes_;
  if (!own.channel) own.channel = store_.open_channel();
  std::swap(own.segments, own.last_segments);
  own.segments.clear();
  for (const Access& a : program.accesses_of(op)) {
    own.segments.push_back({layout_.page(a.page).home_offset, at<std::byte>(a), a.bytes});
  }
  if (own.channel->started() > 0 && overlap(own.segments, own.last_segments)) {
    std::swap(own.segments, own.last_segments);
    return false;
  }
  op.kind == OpKind::read ? own.channel->start_read(own.segments)
                          : own.channel->start_write(own.segments);
  return true;
}

void OpRunner::finish_transfer(const Program& program, const Op& op) {
  try {
    (op.kind == OpKind::read ? reads_ : writes_).channel->finish();
  } catch (const Error& error) {
    std::string pages;
    for (const Access& a : program.accesses_of(op)) {
      pages += (pages.empty() ? "" : " and ") + page_description(layout_.page(a.page));
    }
    throw Error(error.code(), fmt::format("{}: {}", pages, error.what()));
  }
}

void OpRunner::run_forward(std::span<const Access> accesses, const Op& op, StepContext& context) {
  const auto* weights = at<std::byte>(accesses[0]);
  if (op.layer > 0) {
    // Layers follow each other: the first one's op gives the documents.
    const int32_t* const documents =
        batch_ids(context.document_begins, area_.document_begins, op.index, op.layer > 1);
    return layers_->block(op.layer, weights, documents, at<void>(accesses[1]),
                          at<void>(accesses[2]));
  }
  layers_->embed(weights, batch_ids(context.tokens, area_.tokens, op.index, false),
                 at<void>(accesses[1]));
}

void OpRunner::run_head(std::span<const Access> accesses, const Op& op, StepContext& context) {
  const bool backward = op.kind == OpKind::loss;
  const ModelShape& model = layout_.model;
  const bool tied = model.config.tie_word_embeddings;
  size_t next = backward ? 3 : 2;  // those that are there follow in this order
  Model::Head head{.weights = at<std::byte>(accesses[0]),
                   .embedding = nullptr,
                   .sums = nullptr,
                   .embedding_sums = nullptr,
                   .first = op.index == 0};
  if (backward && model.layers.back().trainable()) head.sums = at<float>(accesses[next++]);
  if (tied) head.embedding = at<std::byte>(accesses[next++]);
  if (tied && backward && model.layers[0].trainable()) {
    head.embedding_sums = at<float>(accesses[next++]);
  }
  CHECK(next == accesses.size());
  layers_->loss(head, at<void>(accesses[1]),
                batch_ids(context.targets, area_.targets, op.index, false), context.loss_scale,
                backward ? at<void>(accesses[2]) : nullptr,
                result(context.losses[op.index], area_.losses + op.index * sizeof(double)));
}

void OpRunner::finish_loss(const Op& op, StepContext& context) {
  double& loss = context.losses[op.index];
  loss = *result(loss, area_.losses + op.index * sizeof(double));
  if (!std::isfinite(loss)) context.non_finite = true;
}

void OpRunner::run_backward(std::span<const Access> accesses, const Op& op, StepContext& context) {
  const bool trainable = layout_.model.layers[op.layer].trainable();
  float* sums = trainable ? at<float>(accesses.back()) : nullptr;
  const bool first = accesses.back().mode == AccessMode::write;
  if (op.layer == 0) {
    const int32_t* tokens = batch_ids(context.tokens, area_.tokens, op.index, true);
    return layers_->embed_backward(tokens, at<void>(accesses[0]), sums, first);
  }
  const int32_t* const documents =
      batch_ids(context.document_begins, area_.document_begins, op.index, true);
  layers_->block_backward(op.layer, at<std::byte>(accesses[0]), documents, at<void>(accesses[1]),
                          at<void>(accesses[2]), sums, first);
}

void OpRunner::run_all_gather(std::span<const Access> accesses) {
  const Access& own = accesses[0];
  const PlanOptions& o = layout_.options;
  std::byte* const part = at<std::byte>(own);
  // This rank's part comes from its home, or is in its place among the others.
  const bool apart = accesses[1].bytes == own.bytes * o.ranks;
  std::byte* const whole = apart ? at<std::byte>(accesses[1]) : part - o.rank * own.bytes;
  ranks_.shard->all_gather({part, own.bytes}, {whole, own.bytes * o.ranks});
}

void OpRunner::run_reduce(std::span<const Access> accesses, const Op& op, StepContext& context) {
  const uint64_t part = layout_.shard(op.layer), begin = layout_.options.rank * part;
  const auto* sums = at<float>(accesses[0]);
  double& squares = context.gradient_squares[op.layer];
  state_.square_sum(op.layer, sums, begin, begin + part,
                    result(squares, area_.squares + op.layer * sizeof(double)));
  start_factored_sums(sums, op);
}

void OpRunner::finish_reduce(const Op& op, StepContext& context) {
  double& squares = context.gradient_squares[op.layer];
  squares = *result(squares, area_.squares + op.layer * sizeof(double));
  if (!std::isfinite(squares)) context.non_finite = true;
  if (layout_.options.world() == 1) advance_moments(op, context);
}

/// Sums over rows and columns of this rank's part of each matrix.
void OpRunner::start_factored_sums(const float* sums, const Op& op) {
  const FactoredMoments moments = store_.factored_moments();
  const uint64_t part = layout_.shard(op.layer), begin = layout_.options.rank * part;
  for (const FactoredMatrix& m : layout_.matrices(op.layer)) {
    state_.factored_sums(sums, begin, begin + part, m, moments);
  }
}

void OpRunner::advance_moments(const Op& op, const StepContext& context) {
  if (layout_.options.update != UpdateTiming::in_backward || context.non_finite) return;
  for (const FactoredMatrix& m : layout_.matrices(op.layer)) {
    advance_moment(store_.factored_moments(), m, context.update);
  }
}

void OpRunner::run_agree(const Op& op, StepContext& context) {
  double broken = context.non_finite ? 1 : 0;
  ranks_.world->all_reduce(std::span(&broken, 1));
  context.non_finite = broken > 0;
  const auto matrices = layout_.matrices(op.layer);
  if (matrices.empty()) return;
  const uint64_t first = matrices.front().first;
  const uint64_t end = matrices.back().first + matrices.back().elements();
  if (layout_.options.ranks > 1) {
    ranks_.shard->all_reduce(std::span(store_.factored_moments().sums + first, end - first));
  }
  advance_moments(op, context);
}

void OpRunner::run_export(std::span<const Access> accesses, const Op& op) {
  const auto* source = at<float>(accesses[0]);
  const uint64_t parameters = layout_.chunk(op.layer, op.index).parameters;
  if (accesses[1].bytes < accesses[0].bytes) {
    state_.round_gradient(source, at<uint16_t>(accesses[1]), parameters);
  } else if (const auto to = at<float>(accesses[1]); to != source) {
    if (!layout_.options.streams) {
      std::copy_n(source, parameters, to);
    } else {
      device().enqueue_copy(DeviceStream::compute, at<std::byte>(accesses[1]),
                            at<std::byte>(accesses[0]), parameters * sizeof(float));
    }
  }
}

void OpRunner::run_update(const Program& program, const Op& op, StepContext& context) {
  // A pending update is the last step's, whose numbers were finite, and must not be left half done.
  const bool of_this_step = layout_.options.update == UpdateTiming::in_backward;
  if (of_this_step && context.non_finite) return;
  const std::span<const Access> accesses = program.accesses_of(op);
  const Chunk& chunk = layout_.chunk(op.layer, op.index);
  // Weights, gradient, and last the state, which an optimizer without any does not have.
  const bool stateless = accesses.size() == 2;
  const UpdateChunk work{.weight = at<std::byte>(accesses[0]),
                         .state = stateless ? nullptr : at<std::byte>(accesses.back()),
                         .gradient = at<std::byte>(accesses[1]),
                         .parameters = chunk.parameters,
                         .exact = chunk.exact,
                         .layer = chunk.layer,
                         .first = chunk.begin,
                         .averages = store_.factored_moments().averages};
  const OptimizerSettings rule = layout_.options.update_rule();
  const bool zero = program.kind.moments_zero;
  if (op.lane == Lane::compute) {
    return state_.update(rule, context.update, work, layout_.runs(chunk), zero);
  }
  update_chunk(rule, context.update, work, layout_.runs(chunk), zero);
}

}  // namespace overspill
