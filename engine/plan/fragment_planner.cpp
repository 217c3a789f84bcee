// Pieces of a step, made of the parts of StepPlanner.
#include "engine/plan/fragment_planner.h"

#include <array>

#include "engine/plan/step_planner.h"

namespace overspill {

FragmentPlanner::FragmentPlanner(const Layout& layout, bool moments_zero)
    : layout_(layout),
      steps_(std::make_unique<StepPlanner>(layout, StepKind{.forward = false,
                                                            .backward = false,
                                                            .pending_update = true,
                                                            .moments_zero = moments_zero,
                                                            .micro_batches = 0})) {}

FragmentPlanner::~FragmentPlanner() = default;

/// The planner sees the one place that this layer may use.
void FragmentPlanner::place_ring(uint32_t layer, RingPlace place) {
  steps_->ring_.clear();
  if (place.slot == SlotId{}) return;
  const uint32_t there = place.present ? layer : StepPlanner::kNobody;
  steps_->ring_.push_back({place.slot, there, 0, place.present});
}

void FragmentPlanner::bring(uint32_t layer, RingPlace place, bool update) {
  const bool updates = update && steps_->trainable(layer);
  parts_.push_back({FragmentPart::Kind::bring, layer, place, SlotId{}, updates});
  place_ring(layer, place);
  if (updates) {
    steps_->plan_pending_update(layer, {.for_compute = true, .in_ring = place.present});
    // The other ranks' parts have changed as well.
    for (StepPlanner::RingEntry& entry : steps_->ring_) entry.gathered = false;
  }
  steps_->weights_for_compute(layer);
}

void FragmentPlanner::update(uint32_t layer, RingPlace place) {
  const bool updates = steps_->trainable(layer);
  parts_.push_back({FragmentPart::Kind::update, layer, place, SlotId{}, updates});
  place_ring(layer, place);
  steps_->plan_pending_update(
      layer, {.for_compute = layout_.gathers_updates(layer), .in_ring = place.present});
}

void FragmentPlanner::finish_gradient(uint32_t layer, SlotId sums, RingPlace place) {
  parts_.push_back({FragmentPart::Kind::finish_gradient, layer, place, sums});
  place_ring(layer, place);
  steps_->finish_gradient(layer, {sums, 0});
}

void FragmentPlanner::store_sums(uint32_t layer, SlotId sums) {
  parts_.push_back({FragmentPart::Kind::store_sums, layer, RingPlace{}, sums});
  steps_->reduce_in_group(layer, {sums, 0});  // pages hold this rank's part
  for (uint32_t c = 0; c < layout_.chunk_count(layer); ++c) {
    const Chunk& chunk = layout_.chunk(layer, c);
    if (!chunk.trainable()) continue;
    const PageId id = layout_.gradient(layer, c);
    const Page& page = layout_.page(id);
    const Location at{sums, chunk.begin * sizeof(float)};
    if (page.home == Tier::nvme && steps_->unified_) {
      const Access source = steps_->access(at, id, AccessMode::read);
      steps_->transfer(OpKind::write, layer, c, std::array{source});
    } else if (page.home == Tier::nvme) {
      const Location stage = steps_->stages_.next();
      steps_->copy(OpKind::copy_to_host, id, at, stage);
      const Access source = steps_->access(stage, id, AccessMode::read);
      steps_->transfer(OpKind::write, layer, c, std::array{source});
    } else if (page.home == Tier::host && !steps_->unified_) {
      steps_->copy(OpKind::copy_to_host, id, at, steps_->home(id));
    } else {
      steps_->emit(OpKind::export_gradient, Lane::compute, layer, c, chunk.parameters,
                   {steps_->access(at, id, AccessMode::read),
                    steps_->access(steps_->home(id), id, AccessMode::write)});
    }
  }
}

void FragmentPlanner::load_sums(uint32_t layer, SlotId sums) {
  parts_.push_back({FragmentPart::Kind::load_sums, layer, RingPlace{}, sums});
  for (uint32_t c = 0; c < layout_.chunk_count(layer); ++c) {
    const Chunk& chunk = layout_.chunk(layer, c);
    if (!chunk.trainable()) continue;
    const PageId id = layout_.gradient(layer, c);
    const Page& page = layout_.page(id);
    const Location at{sums, chunk.begin * sizeof(float)};
    if (page.home == Tier::nvme) {
      const Location landing = steps_->unified_ ? at : steps_->stages_.next();
      const Access target = steps_->access(landing, id, AccessMode::write);
      steps_->transfer(OpKind::read, layer, c, std::array{target});
      if (!steps_->unified_) steps_->copy(OpKind::copy_to_device, id, landing, at);
    } else if (page.home == Tier::host && !steps_->unified_) {
      steps_->copy(OpKind::copy_to_device, id, steps_->home(id), at);
    } else {
      steps_->emit(OpKind::export_gradient, Lane::compute, layer, c, chunk.parameters,
                   {steps_->access(steps_->home(id), id, AccessMode::read),
                    steps_->access(at, id, AccessMode::write)});
    }
  }
}

bool FragmentPlanner::empty() const { return steps_->program_.ops.empty(); }

Program FragmentPlanner::take() { return std::move(steps_->program_); }

}  // namespace overspill
