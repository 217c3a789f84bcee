// A fragment's ops: what each finds, what it leaves, and whether its turn has come.
#include <algorithm>

#include "engine/base/error.h"
#include "engine/program/dump.h"
#include "engine/program/fragment_verifier.h"
#include "engine/program/op_rules.h"

namespace overspill {
namespace {

bool is_collective(OpKind kind) {
  return kind == OpKind::all_gather || kind == OpKind::reduce_scatter ||
         kind == OpKind::all_reduce || kind == OpKind::agree;
}

}  // namespace

void FragmentVerifier::require(bool condition, OpId id, const char* otherwise) const {
  if (!condition) refuse_op(*program_, id, "{}", otherwise);
}

void FragmentVerifier::check_op(OpId id) {
  const Op& op = program_->ops[id.value];
  check_dependencies(*program_, id);
  check_lane(*program_, id);
  require(work_.contains(op.layer), id, "no part is of its layer");
  check_order(id, op);
  Contents::Value moved;
  for (const Access& access : program_->accesses_of(op)) check_access(id, op, access, moved);
}

void FragmentVerifier::check_order(OpId id, const Op& op) {
  const PlanOptions& o = layout_.options;
  Work& work = work_[op.layer];
  LayerState& layer = layers_[op.layer];
  const uint32_t sums = newest_[sum_of(op.layer).value];
  if (is_collective(op.kind)) {
    const bool next = collected_ < collectives_.size() &&
                      collectives_[collected_].kind == op.kind &&
                      collectives_[collected_].layer == op.layer;
    require(next, id, "another collective is the parts' next");
    ++collected_;
  }
  switch (op.kind) {
    case OpKind::read:
    case OpKind::write: return require(op.access_count > 0, id, "moves nothing");
    case OpKind::copy_to_device:
    case OpKind::copy_to_host: return check_copy(id, op);
    case OpKind::export_gradient: return check_export(id, op);
    case OpKind::update: return check_update(id, op);
    case OpKind::all_gather: return check_gather(id, op);
    case OpKind::reduce_scatter: layer.reduced = sums + 1; return;
    case OpKind::all_reduce:
      require(o.ranks == 1 || layer.reduced == sums, id, "sums are not those of the ranks");
      layer.reduced = sums + 1;
      ++work.all_reduce;
      return;
    case OpKind::reduce_gradient:
      require(work.finishes, id, "its gradient is not complete");
      require(o.replicas == 1 || work.all_reduce == 1, id, "sums are not those of the replicas");
      require(o.world() == 1 || layer.reduced == sums, id, "sums are not those of the ranks");
      ++work.reduce_gradient;
      return;
    case OpKind::agree:
      require(work.reduce_gradient == 1, id, "gradients are not reduced");
      ++work.agree;
      return age_peer_weights(op.layer);
    default: require(false, id, "computes a layer, which another program does");
  }
}

void FragmentVerifier::check_copy(OpId id, const Op& op) const {
  const std::span<const Access> a = program_->accesses_of(op);
  const bool whole = a.size() == 2 && a[0].mode == AccessMode::read &&
                     a[1].mode == AccessMode::write && a[0].page == a[1].page;
  require(whole, id, "is no copy of a page");
}

/// The sums leave as a gradient, or move as they are.
void FragmentVerifier::check_export(OpId id, const Op& op) {
  require(op.index < layout_.chunk_count(op.layer), id, "there is no such chunk");
  const Work& work = work_[op.layer];
  const PageId gradient = layout_.gradient(op.layer, op.index);
  const std::span<const Access> a = program_->accesses_of(op);
  const bool there = a.size() == 2 && a[0].mode == AccessMode::read &&
                     a[1].mode == AccessMode::write && a[1].page == gradient;
  require(there, id, "leaves no gradient");
  require(trains_here(op.layer, op.index), id, "nothing trains in its chunk");
  if (a[0].page == gradient) return require(work.stores || work.loads, id, "moves no sums");
  require(a[0].page == sum_of(op.layer), id, "takes no sums");
  require(work.reduce_gradient == 1, id, "gradients are not reduced");
  require(!agrees() || work.agree == 1, id, "the ranks have not agreed");
  const bool used = updated_[layout_.weight(op.layer, op.index).value] > 0;
  require(in_backward() || !work.updates || used, id,
          "the pending update has yet to use the gradient before");
  ++exported_[gradient.value];
}

void FragmentVerifier::check_update(OpId id, const Op& op) {
  require(op.index < layout_.chunk_count(op.layer), id, "there is no such chunk");
  require(begun(work_[op.layer]), id, "no update of its layer is asked for, or agreed on");
  require(trains_here(op.layer, op.index), id, "nothing trains in its chunk");
  const PageId weight = layout_.weight(op.layer, op.index);
  const PageId gradient = layout_.gradient(op.layer, op.index);
  const PageId state = layout_.optimizer(op.layer, op.index);
  const std::span<const Access> a = program_->accesses_of(op);
  const bool stateless = layout_.page(state).bytes == 0;
  const bool there =
      a.size() >= (stateless ? 2 : 3) && a[0].page == weight && a[0].mode == AccessMode::update &&
      a[1].page == gradient && a[1].mode == AccessMode::read &&
      (stateless || a.back().mode != AccessMode::read) &&
      std::ranges::all_of(a.subspan(2), [&](const Access& access) { return access.page == state; });
  require(there, id, "does not take the chunk's weights, gradient and state");
  check_state_place(*program_, layout_, id);
  const uint32_t exports = exported_[gradient.value];
  require(exports == (in_backward() ? 1u : 0u), id, "takes a gradient of another step");
  require(updated_[weight.value]++ == 0, id, "is there already");
}

/// What is gathered behind the ranks' updates is this rank's new weights.
void FragmentVerifier::check_gather(OpId id, const Op& op) {
  const bool updates = begun(work_[op.layer]);
  require(updates || !layout_.gathers_updates(op.layer), id, "there is no update to share");
  for (uint32_t c = 0; updates && c < layout_.chunk_count(op.layer); ++c) {
    const bool old = trains_here(op.layer, c) && updated_[layout_.weight(op.layer, c).value] == 0;
    require(!old, id, "gathers weights that are not updated");
  }
}

void FragmentVerifier::check_access(OpId id, const Op& op, const Access& access,
                                    Contents::Value& moved) {
  check_reach(*program_, layout_, id, access);
  check_place(id, op, access);
  const bool nvme = op.kind == OpKind::read || op.kind == OpKind::write;
  if (nvme) {
    const AccessMode mode = op.kind == OpKind::read ? AccessMode::write : AccessMode::read;
    require(access.mode == mode && access.page_count == 1, id, "is no transfer of a page");
    require(layout_.page(access.page).home == Tier::nvme, id, "a page has no home on NVMe");
  }
  if (op.kind == OpKind::read) moved = newest(id, contents_.read_nvme(id, access.page));
  uint64_t offset = access.offset;
  for (uint32_t i = 0; i < access.page_count; ++i) {
    const PageId page{access.page.value + i};
    const auto [skipped, bytes] = part_of(op, access, page);
    if (access.page_count == 1 && (access.bytes != bytes || access.offset < skipped)) {
      refuse_op(*program_, id, "an access covers {} bytes of {}, not {}", access.bytes,
                page_name(layout_.page(page)), bytes);
    }
    check_page(id, op, access, page);
    const Contents::Range range{access.slot, page, offset, offset + bytes, offset - skipped};
    if (access.mode != AccessMode::write) moved = find(id, op, range);
    if (access.mode == AccessMode::read) contents_.read(id, range);
    if (access.mode != AccessMode::read) {
      check_home(id, op, range);
      write(id, range, made(id, op, page, moved));
    }
    offset += bytes;
  }
  require(offset == access.offset + access.bytes, id, "an access ends inside a page");
  if (op.kind == OpKind::write) contents_.write_nvme(id, access.page, moved);
}

/// Of this op's layer and chunk; only what trains is written on NVMe.
void FragmentVerifier::check_page(OpId id, const Op& op, const Access& access, PageId page) const {
  const Page& p = layout_.page(page);
  const bool of_chunk =
      p.kind == PageKind::weight || p.kind == PageKind::optimizer || p.kind == PageKind::gradient;
  const bool of_layer = p.kind == PageKind::peer_weight || p.kind == PageKind::gradient_sum;
  require((of_chunk || of_layer) && p.layer == op.layer, id, "takes another layer's page");
  if (!of_chunk || access.page_count > 1 || op.kind == OpKind::all_gather) return;
  require(p.index == op.index, id, "takes another chunk's page");
  require(op.kind != OpKind::write || trains_[op.layer][op.index], id, "writes what is frozen");
}

/// Places of the ring and of sums are those of the layer's parts.
void FragmentVerifier::check_place(OpId id, const Op& op, const Access& access) const {
  const Use use = uses_[access.slot.value];
  const bool given =
      (use != Use::ring && use != Use::sums) || given_.contains({access.slot.value, op.layer});
  if (use != Use::none && given) return;
  refuse_op(*program_, id, "touches slot {}, which is not the layer's", access.slot.value);
}

/// In homes' slots pages are written at home alone.
void FragmentVerifier::check_home(OpId id, const Op& op, const Contents::Range& range) const {
  if (uses_[range.slot.value] != Use::home) return;
  const Page& page = layout_.page(range.page);
  require(page.home_slot == range.slot && page.home_offset == range.begin, id,
          "writes a page where another one is at home");
  const bool frozen = page.kind == PageKind::weight && !trains_[page.layer][page.index];
  require(!frozen || op.kind == OpKind::all_gather, id, "writes what is frozen");
}

std::pair<uint64_t, uint64_t> FragmentVerifier::part_of(const Op& op, const Access& access,
                                                        PageId id) const {
  const Page& page = layout_.page(id);
  const uint64_t part = layout_.shard(op.layer) * sizeof(float);
  if (page.kind == PageKind::gradient_sum && op.kind == OpKind::export_gradient) {
    const Chunk& chunk = layout_.chunk(op.layer, op.index);
    return {chunk.begin * sizeof(float), chunk.parameters * sizeof(float)};
  }
  if (page.kind == PageKind::gradient_sum && takes_own_part(op.kind)) {
    return {layout_.options.rank * part, part};
  }
  const bool exports = op.kind == OpKind::export_gradient && access.mode == AccessMode::write;
  if (page.kind == PageKind::gradient && exports &&
      program_->accesses_of(op)[0].page == sum_of(op.layer)) {
    return {0, gradient_bytes(id)};
  }
  // While moments are zero, only the remainders before them are read.
  const bool reads =
      op.kind == OpKind::read || (op.kind == OpKind::update && access.mode == AccessMode::read);
  if (page.kind == PageKind::optimizer && program_->kind.moments_zero && reads) {
    return {0, std::min(page.bytes, access.bytes)};
  }
  return {0, page.bytes};
}

Contents::Value FragmentVerifier::newest(OpId id, Contents::Value found) const {
  if (found.version == newest_[found.page.value]) return found;
  refuse_op(*program_, id, "finds version {} of {}, not {}", found.version,
            page_name(layout_.page(found.page)), newest_[found.page.value]);
}

/// What moves a gradient's page may find a part of the sums there.
Contents::Value FragmentVerifier::find(OpId id, const Op& op, const Contents::Range& range) const {
  Contents::Range known = range;
  if (layout_.page(range.page).kind == PageKind::gradient) {
    const auto there = contents_.at(range.slot, range.begin);
    const bool moves = moves_pages(op.kind) || op.kind == OpKind::export_gradient;
    const bool sums = moves && there && there->page == sum_of(op.layer);
    require(sums || op.kind != OpKind::export_gradient, id, "moves no sums");
    known = sums ? sums_range(range.slot, range.begin, range.page)
                 : range_of(range.slot, range.begin, range.page);
  }
  return newest(id, {known.page, contents_.find(id, known)});
}

/// Behind a rounded gradient, the rest of a page for sums means nothing.
void FragmentVerifier::write(OpId id, const Contents::Range& range, Contents::Value value) {
  if (layout_.page(range.page).kind != PageKind::gradient) {
    return contents_.write(id, range, value.version);
  }
  const Contents::Range known = value.page == range.page
                                    ? range_of(range.slot, range.begin, range.page)
                                    : sums_range(range.slot, range.begin, range.page);
  contents_.write(id, known, value.version);
  if (known.end < range.end) {
    contents_.write(id, {range.slot, PageId{}, known.end, range.end, known.end}, 0);
  }
}

/// What an access leaves: what was found elsewhere, or a new version.
Contents::Value FragmentVerifier::made(OpId id, const Op& op, PageId page, Contents::Value moved) {
  const PageKind kind = layout_.page(page).kind;
  const PageId sum = sum_of(op.layer);
  const bool moves_sums = kind == PageKind::gradient && moved.page == sum;
  switch (op.kind) {
    case OpKind::read:
    case OpKind::copy_to_device:
    case OpKind::copy_to_host:
      require(moved.page == page || moves_sums, id, "leaves another page than it takes");
      return moved;
    case OpKind::export_gradient:
      if (program_->accesses_of(op)[0].page == page) return moved;
      return {page, ++newest_[page.value]};
    case OpKind::all_gather:
      require(kind == PageKind::weight || kind == PageKind::peer_weight, id, "gathers no weights");
      return {page, gathered(op, page)};
    case OpKind::update: return {page, ++newest_[page.value]};
    case OpKind::reduce_scatter:
    case OpKind::all_reduce:
    case OpKind::agree:
      require(page == sum, id, "changes no sums");
      return {page, ++newest_[page.value]};
    default: refuse_op(*program_, id, "writes in a slot");
  }
}

uint32_t FragmentVerifier::gathered(const Op& op, PageId id) {
  const Page& page = layout_.page(id);
  const bool changes = layout_.gathers_updates(op.layer) && page.kind == PageKind::weight &&
                       trains_[op.layer][page.index] && !trains_here(op.layer, page.index);
  return changes ? ++newest_[id.value] : newest_[id.value];
}

/// What was gathered before the ranks' weights change is old.
void FragmentVerifier::age_peer_weights(uint32_t layer) {
  for (uint32_t i = 0; i < layout_.whole_weight_count(layer); ++i) {
    const uint32_t page = layout_.first_whole_weight[layer].value + i;
    if (layout_.pages[page].kind == PageKind::peer_weight) ++newest_[page];
  }
}

}  // namespace overspill
