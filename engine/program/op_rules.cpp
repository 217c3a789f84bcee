// Each rule looks at one op, or at the layout alone.
#include "engine/program/op_rules.h"

#include <algorithm>
#include <optional>
#include <tuple>

#include "engine/base/error.h"
#include "engine/program/contents.h"

namespace overspill {

void check_layout(const Layout& layout) {
  const PlanOptions& o = layout.options;
  if (layout.device_bytes > o.device_memory || layout.host_bytes > o.host_memory ||
      layout.nvme_bytes > o.nvme_capacity) {
    fail(ErrorCode::internal, "program verification: the layout exceeds a budget");
  }
  std::vector<Slot> sorted = layout.slots;
  // Empty slots come before what is where they are.
  std::ranges::sort(sorted, {},
                    [](const Slot& s) { return std::tuple(s.memory, s.offset, s.bytes); });
  for (size_t i = 0; i < sorted.size(); ++i) {
    const uint64_t arena =
        sorted[i].memory == Tier::device ? layout.device_bytes : layout.host_bytes;
    const bool overlaps = i > 0 && sorted[i - 1].memory == sorted[i].memory &&
                          sorted[i - 1].offset + sorted[i - 1].bytes > sorted[i].offset;
    if (overlaps || sorted[i].offset + sorted[i].bytes > arena) {
      fail(ErrorCode::internal, "program verification: slots overlap or leave their arena");
    }
  }
}

void check_dependencies(const Program& program, OpId id) {
  for (const OpId dep : program.deps_of(program.ops[id.value])) {
    if (dep.value >= id.value) refuse_op(program, id, "depends on a later op {}", dep.value);
  }
}

void check_lane(const Program& program, OpId id) {
  const Op& op = program.ops[id.value];
  const auto expect = [&](Lane lane) {
    if (op.lane != lane) refuse_op(program, id, "is in lane {}", lane_name(op.lane));
  };
  switch (op.kind) {
    case OpKind::read: return expect(Lane::nvme_read);
    case OpKind::write: return expect(Lane::nvme_write);
    case OpKind::copy_to_device: return expect(Lane::h2d);
    case OpKind::copy_to_host: return expect(Lane::d2h);
    case OpKind::forward:
    case OpKind::loss:
    case OpKind::score:
    case OpKind::backward:
    case OpKind::reduce_gradient:
    case OpKind::export_gradient: return expect(Lane::compute);
    case OpKind::update:
      if (op.lane != Lane::compute) expect(Lane::optimizer);  // where the state lives
      return;
    case OpKind::all_gather:
    case OpKind::reduce_scatter:
    case OpKind::all_reduce:
    case OpKind::agree: return expect(Lane::collective);
  }
}

void check_reach(const Program& program, const Layout& layout, OpId id, const Access& access) {
  const Slot& slot = layout.slot(access.slot);
  const uint32_t number = access.slot.value;
  if (access.offset + access.bytes > slot.bytes) {
    refuse_op(program, id, "leaves slot {}", number);
  }
  if (layout.options.unified) return;
  const bool device = slot.memory == Tier::device;
  const bool written = access.mode != AccessMode::read;
  switch (program.ops[id.value].lane) {
    case Lane::nvme_read:
    case Lane::nvme_write:
    case Lane::optimizer:
      if (device) refuse_op(program, id, "touches device slot {}", number);
      return;
    case Lane::compute:
    case Lane::collective:
      if (!device) refuse_op(program, id, "touches host slot {}", number);
      return;
    case Lane::h2d:
      if (device != written) refuse_op(program, id, "copies the wrong way");
      return;
    case Lane::d2h:
      if (device == written) refuse_op(program, id, "copies the wrong way");
      return;
  }
}

void check_state_place(const Program& program, const Layout& layout, OpId id) {
  std::optional<Access> state;
  for (const Access& access : program.accesses_of(program.ops[id.value])) {
    if (layout.page(access.page).kind != PageKind::optimizer) continue;
    if (state && (state->slot != access.slot || state->offset != access.offset)) {
      refuse_op(program, id, "its state lies in two places");
    }
    state = access;
  }
}

std::vector<char> training_chunks(const Layout& layout, uint32_t layer) {
  std::vector<char> trains;
  const PlanOptions& o = layout.options;
  uint64_t begin = o.shard_weights ? o.rank * layout.shard(layer) : 0;
  for (uint32_t c = 0; c < layout.chunk_count(layer); ++c) {
    const uint64_t end = begin + layout.page(layout.weight(layer, c)).bytes / o.weight_bytes();
    trains.push_back(
        std::ranges::any_of(layout.model.layers[layer].tensors, [&](const LayerTensor& t) {
          return t.trainable && t.offset < end && begin < t.offset + t.elements;
        }));
    begin = end;
  }
  return trains;
}

bool takes_own_part(OpKind kind) {
  return kind == OpKind::reduce_gradient || kind == OpKind::all_reduce || kind == OpKind::agree;
}

bool moves_pages(OpKind kind) {
  return kind == OpKind::read || kind == OpKind::write || kind == OpKind::copy_to_device ||
         kind == OpKind::copy_to_host;
}

}  // namespace overspill
