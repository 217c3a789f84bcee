// What a fragment's parts ask for: whether that can be, and whether it is there at the end.
#include "engine/program/fragment_verifier.h"

#include <algorithm>

#include "engine/base/error.h"
#include "engine/program/dump.h"
#include "engine/program/op_rules.h"

namespace overspill {
namespace {

using Kind = FragmentPart::Kind;

const char* part_name(Kind kind) {
  switch (kind) {
    case Kind::bring: return "bring";
    case Kind::update: return "update";
    case Kind::finish_gradient: return "finish_gradient";
    case Kind::store_sums: return "store_sums";
    case Kind::load_sums: return "load_sums";
  }
  return "?";
}

template <class... Args>
[[noreturn]] void refuse_layer(uint32_t layer, fmt::format_string<Args...> text, Args&&... args) {
  fail(ErrorCode::internal, "fragment verification: layer {}: {}", layer,
       fmt::format(text, std::forward<Args>(args)...));
}

template <class... Args>
[[noreturn]] void refuse_part(const FragmentPart& part, fmt::format_string<Args...> text,
                              Args&&... args) {
  refuse_layer(part.layer, "{}: {}", part_name(part.kind),
               fmt::format(text, std::forward<Args>(args)...));
}

}  // namespace

FragmentVerifier::FragmentVerifier(const Layout& layout)
    : layout_(layout),
      contents_(layout),
      uses_(layout.slots.size()),
      newest_(layout.pages.size()),
      layers_(layout.model.layers.size()),
      updated_(layout.pages.size()),
      exported_(layout.pages.size()) {
  check_layout(layout);
  for (uint32_t l = 0; l < layers_.size(); ++l) trains_.push_back(training_chunks(layout, l));
  const auto use = [&](const std::vector<SlotId>& slots, Use as) {
    for (const SlotId slot : slots) uses_[slot.value] = as;
  };
  use(layout.weight_ring, Use::ring);
  use(layout.gradient_ring, Use::sums);
  use(layout.stages, Use::passage);
  use(layout.records, Use::passage);
  use(layout.device_stages, Use::passage);
  for (uint32_t i = 0; i < layout.pages.size(); ++i) {
    const Page& page = layout.pages[i];
    if (page.home_slot != SlotId{}) uses_[page.home_slot.value] = Use::home;
    const bool state = page.kind == PageKind::weight || page.kind == PageKind::optimizer;
    if (state && page.bytes > 0) contents_.store(PageId{i});
  }
}

void FragmentVerifier::verify(const Program& program, std::span<const FragmentPart> parts) {
  program_ = &program;
  work_.clear();
  given_.clear();
  ring_.clear();
  collectives_.clear();
  collected_ = 0;
  // Stages are of one fragment.
  for (uint32_t s = 0; s < uses_.size(); ++s) {
    if (uses_[s] == Use::passage) contents_.forget(SlotId{s});
  }
  for (const FragmentPart& part : parts) begin_part(part);
  contents_.begin(program);
  for (uint32_t i = 0; i < program.ops.size(); ++i) check_op(OpId{i});
  contents_.end();
  check_end();
}

void FragmentVerifier::end_step(const std::vector<char>& pending) {
  for (uint32_t l = 0; l < layers_.size(); ++l) {
    LayerState& layer = layers_[l];
    if (layer.pending) refuse_layer(l, "the step ends before the last one's update is applied");
    if (pending[l] != 0 && !layer.complete) {
      refuse_layer(l, "the step ends before the gradient of its update is complete");
    }
    layer.pending = pending[l] != 0;
    layer.complete = false;
  }
}

void FragmentVerifier::forget() {
  for (const SlotId slot : layout_.weight_ring) contents_.forget(slot);
  for (LayerState& layer : layers_) layer = {.sums_slot = {}, .reduced = layer.reduced};
}

void FragmentVerifier::begin_part(const FragmentPart& part) {
  const uint32_t l = part.layer;
  if (l >= layers_.size()) refuse_part(part, "there is no such layer");
  const bool first = work_.find(l) == work_.end();
  Work& work = work_[l];
  for (uint32_t c = 0; first && c < layout_.chunk_count(l); ++c) {
    updated_[layout_.weight(l, c).value] = 0;
    exported_[layout_.gradient(l, c).value] = 0;
  }
  LayerState& layer = layers_[l];
  give_place(part);
  switch (part.kind) {
    case Kind::bring:
    case Kind::update:
      if (part.updates) {
        begin_update(part);
      } else if (layer.pending) {
        refuse_part(part, "leaves out the pending update");
      }
      break;
    case Kind::finish_gradient:
      take_sums(part);
      if (work.finishes || layer.complete) refuse_part(part, "the gradient is complete already");
      work.finishes = true;
      layer.sums = Sums::none;
      layer.complete = true;
      if (in_backward()) begin_update(part);
      break;
    case Kind::store_sums:
      if (!layout_.options.pages_sums(l)) refuse_part(part, "its pages are too small for sums");
      take_sums(part);
      work.stores = true;
      layer.sums = Sums::paged;
      break;
    case Kind::load_sums:
      if (layer.sums != Sums::paged) refuse_part(part, "its sums are not in pages");
      given_.emplace(part.sums.value, l);
      contents_.forget(part.sums);
      work.loads = true;
      layer.sums = Sums::slot;
      layer.sums_slot = part.sums;
      break;
  }
  expect_collectives(part);
  expect_ring(part);
}

void FragmentVerifier::begin_update(const FragmentPart& part) {
  Work& work = work_[part.layer];
  LayerState& layer = layers_[part.layer];
  if (work.updates) refuse_part(part, "is updated twice");
  if (!in_backward() && !layer.pending) refuse_part(part, "no update is pending");
  work.updates = true;
  layer.pending = false;
  if (!agrees()) age_peer_weights(part.layer);  // else where the ranks agree
}

/// What a place held before it was the layer's is of no use any more.
void FragmentVerifier::give_place(const FragmentPart& part) {
  const SlotId slot = part.place.slot;
  if (slot == SlotId{}) return;
  if (slot.value >= uses_.size() || uses_[slot.value] != Use::ring) {
    refuse_part(part, "slot {} is none of the ring's", slot.value);
  }
  const auto before = given_.lower_bound({slot.value, 0});
  const bool first = before == given_.end() || before->first != slot.value;
  if (first && !part.place.present) contents_.forget(slot);
  given_.emplace(slot.value, part.layer);
}

/// The computing program has filled the sums since the last fragment.
void FragmentVerifier::take_sums(const FragmentPart& part) {
  const uint32_t l = part.layer;
  LayerState& layer = layers_[l];
  if (part.sums.value >= uses_.size() || uses_[part.sums.value] != Use::sums) {
    refuse_part(part, "slot {} is none of sums", part.sums.value);
  }
  if (layer.pending) refuse_part(part, "the pending update has yet to use the gradient before");
  if (layer.sums == Sums::paged) refuse_part(part, "its sums are in pages");
  if (layer.sums == Sums::slot && layer.sums_slot != part.sums) {
    refuse_part(part, "its sums are in slot {}, not in {}", layer.sums_slot.value, part.sums.value);
  }
  if (work_[l].loads) refuse_part(part, "its sums are still being loaded");
  const auto given = given_.lower_bound({part.sums.value, 0});
  if (given != given_.end() && given->first == part.sums.value) {
    refuse_part(part, "slot {} has other sums in this fragment", part.sums.value);
  }
  given_.emplace(part.sums.value, l);
  const PageId sum = sum_of(l);
  contents_.hold({part.sums, sum, 0, layout_.page(sum).bytes, 0}, ++newest_[sum.value]);
}

void FragmentVerifier::expect_collectives(const FragmentPart& part) {
  const PlanOptions& o = layout_.options;
  const uint32_t l = part.layer;
  const auto expect = [&](bool there, OpKind kind) {
    if (there) collectives_.push_back({kind, l});
  };
  const bool finishes = part.kind == Kind::finish_gradient;
  const bool updates = part.updates || (finishes && in_backward());
  expect((finishes || part.kind == Kind::store_sums) && o.ranks > 1, OpKind::reduce_scatter);
  expect(finishes && o.replicas > 1, OpKind::all_reduce);
  expect(finishes && agrees(), OpKind::agree);
  expect(updates && layout_.gathers_updates(l), OpKind::all_gather);
  const bool missing = part.updates || !part.place.present;
  expect(part.kind == Kind::bring && o.gathers_weights() && missing, OpKind::all_gather);
}

void FragmentVerifier::expect_ring(const FragmentPart& part) {
  const uint32_t l = part.layer;
  const bool finishes = part.kind == Kind::finish_gradient;
  const bool changes = part.updates || (finishes && in_backward());
  if (part.kind != Kind::bring && !changes) return;
  // The program may have the layer in use since it was brought.
  for (auto& [slot, placed] : ring_) placed.old |= placed.layer == l;
  if (part.place.slot == SlotId{}) {
    const bool readable = !layout_.options.gathers_weights() &&
                          layout_.compute_addresses(layout_.page(layout_.weight(l, 0)));
    if (part.kind == Kind::bring && !readable) refuse_part(part, "has no place in the ring");
    return;
  }
  // An update alone passes through a place; what is present there, it changes in that place where
  // the host shares the device's memory.
  const bool in_place =
      part.place.present && layout_.options.unified && !layout_.options.gathers_weights();
  if (part.kind == Kind::bring || in_place) {
    ring_.insert_or_assign(part.place.slot.value, Placed{l, false});
  } else if (const auto there = ring_.find(part.place.slot.value);
             there != ring_.end() && there->second.layer != l) {
    ring_.erase(there);
  }
}

void FragmentVerifier::check_end() {
  if (collected_ < collectives_.size()) {
    refuse_layer(collectives_[collected_].layer, "{} is missing",
                 op_name(collectives_[collected_].kind));
  }
  for (const auto& [layer, work] : work_) {
    check_weights(layer, work);
    check_gradient(layer, work);
  }
  for (const auto& [slot, placed] : ring_) check_ring(SlotId{slot}, placed);
}

void FragmentVerifier::check_weights(uint32_t layer, const Work& work) const {
  const auto at_home = [&](PageId id) {
    const Page& page = layout_.page(id);
    if (page.bytes == 0 || contents_.version_at_home(id) == newest_[id.value]) return;
    refuse_layer(layer, "{} is not in its newest version at home", page_name(page));
  };
  for (uint32_t c = 0; c < layout_.chunk_count(layer); ++c) {
    const PageId weight = layout_.weight(layer, c);
    at_home(weight);
    at_home(layout_.optimizer(layer, c));
    const uint32_t wanted = work.updates && trains_here(layer, c) ? 1 : 0;
    if (updated_[weight.value] != wanted) {
      refuse_layer(layer, "chunk {} is updated {} times, not {}", c, updated_[weight.value],
                   wanted);
    }
  }
}

void FragmentVerifier::check_gradient(uint32_t layer, const Work& work) {
  const LayerState& state = layers_[layer];
  const PageId sum = sum_of(layer);
  const uint32_t sums = newest_[sum.value];
  if (work.reduce_gradient != (work.finishes ? 1u : 0u)) {
    refuse_layer(layer, "its gradient is reduced {} times", work.reduce_gradient);
  }
  if (work.stores && layout_.options.ranks > 1 && state.reduced != sums) {
    refuse_layer(layer, "its sums are stored, and not summed over the ranks");
  }
  for (uint32_t c = 0; c < layout_.chunk_count(layer); ++c) {
    if (!trains_here(layer, c)) continue;
    const PageId id = layout_.gradient(layer, c);
    const Page& page = layout_.page(id);
    const Contents::Value gradient{id, newest_[id.value]}, part{sum, sums};
    const auto in_slot = [&](const Contents::Range& range, uint32_t version) {
      return contents_.version_in(range) == version;
    };
    if (exported_[id.value] != (work.finishes ? 1u : 0u)) {
      refuse_layer(layer, "chunk {} leaves its sums {} times", c, exported_[id.value]);
    }
    const bool nvme = page.home == Tier::nvme;
    if (work.finishes && !in_backward() &&
        !(nvme ? contents_.on_nvme(id) == gradient
               : in_slot(range_of(page.home_slot, page.home_offset, id), gradient.version))) {
      refuse_layer(layer, "{} is not at home", page_name(page));
    }
    if (state.sums == Sums::paged &&
        !(nvme ? contents_.on_nvme(id) == part
               : in_slot(sums_range(page.home_slot, page.home_offset, id), sums))) {
      refuse_layer(layer, "the sums of chunk {} are not in its page", c);
    }
    const uint64_t offset = layout_.chunk(layer, c).begin * sizeof(float);
    if (work.loads && !in_slot(sums_range(state.sums_slot, offset, id), sums)) {
      refuse_layer(layer, "the sums of chunk {} are not loaded", c);
    }
  }
}

void FragmentVerifier::check_ring(SlotId slot, Placed placed) const {
  const uint32_t layer = placed.layer;
  uint64_t offset = 0;
  for (uint32_t i = 0; i < layout_.whole_weight_count(layer); ++i) {
    const PageId id{layout_.first_whole_weight[layer].value + i};
    const uint64_t end = offset + layout_.page(id).bytes;
    const auto found = contents_.version_in({slot, id, offset, end, offset});
    const uint32_t newest = newest_[id.value];
    const bool was_newest = placed.old && found && *found + 1 == newest;
    if (found != newest && !was_newest) {
      refuse_layer(layer, "{} is not in its newest version in slot {}", page_name(layout_.page(id)),
                   slot.value);
    }
    offset = end;
  }
}

uint64_t FragmentVerifier::gradient_bytes(PageId id) const {
  const Page& page = layout_.page(id);
  const uint64_t parameters = layout_.chunk(page.layer, page.index).parameters;
  return std::min(page.bytes, parameters * layout_.options.gradient_bytes());
}

Contents::Range FragmentVerifier::range_of(SlotId slot, uint64_t offset, PageId id) const {
  const Page& page = layout_.page(id);
  const uint64_t bytes = page.kind == PageKind::gradient ? gradient_bytes(id) : page.bytes;
  return {slot, id, offset, offset + bytes, offset};
}

/// The origin may be before the slot; it is only compared.
Contents::Range FragmentVerifier::sums_range(SlotId slot, uint64_t offset, PageId id) const {
  const Page& page = layout_.page(id);
  const Chunk& chunk = layout_.chunk(page.layer, page.index);
  return {slot, sum_of(page.layer), offset, offset + chunk.parameters * sizeof(float),
          offset - chunk.begin * sizeof(float)};
}

}  // namespace overspill
