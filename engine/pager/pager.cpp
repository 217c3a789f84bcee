// What is decided once: the plan, and which slots there are.
#include "engine/pager/pager.h"

#include <algorithm>

#include "engine/base/error.h"
#include "engine/train/rank_setup.h"
#include "engine/train/run_setup.h"

namespace overspill {
namespace {

/// Gradients that come in several parts between which other layers' do: those of several
/// micro-batches, and of tied tensors.
std::vector<char> paged_sums(const LayerRegistry& registry, const TrainConfig& config,
                             bool micro_batch_major) {
  const ModelShape& model = registry.shape();
  const bool all = micro_batch_major && config.gradient_accumulation_steps > 1;
  std::vector<char> paged(model.layers.size());
  for (uint32_t l = 0; l < paged.size(); ++l) {
    bool tied = false;
    for (uint32_t t = 0; t < model.layers[l].tensors.size(); ++t) tied |= registry.ties(l, t) > 0;
    paged[l] = (all || tied) && model.layers[l].trainable();
  }
  return paged;
}

Layout plan(const LayerRegistry& registry, const TrainConfig& config, const Ranks& ranks,
            const Pager::Options& pager, const StateMath& state) {
  PlanOptions options = state_options(config, ranks.identity(), pager.gpu, state.scratch_bytes());
  options.micro_batches = 0;  // no activations
  const auto layers = static_cast<uint32_t>(registry.layers().size());
  options.held_layers = std::min(pager.held_layers, layers) + registry.most_tied_layers();
  options.paged_sums = paged_sums(registry, config, pager.micro_batch_major);
  const auto least = [&](uint64_t own) { return std::ranges::min(ranks.gather(own)); };
  Layout layout = plan_layout(registry.shape(), options);
  const uint64_t depth = least(layout.prefetch_depth), chunk = least(layout.chunk_parameters);
  options.prefetch_depth = static_cast<uint32_t>(depth);
  options.chunk_parameters = chunk;
  // A layer that is not held must have a place to be updated in.
  if (depth == 0) ++options.held_layers;
  return plan_layout(registry.shape(), options);
}

}  // namespace

Pager::Pager(LayerRegistry registry, const TrainConfig& config, const Ranks& ranks, Options options)
    : registry_(std::move(registry)),
      config_(with_own_devices(with_chosen_drives(config), ranks)),
      ranks_(ranks),
      options_(std::move(options)),
      state_(make_state_math(registry_.shape(), options_.gpu)),
      layout_(plan(registry_, config_, ranks, options_, *state_)),
      store_(layout_, store_options(config_.offload, options_.gpu)),
      gpu_(dynamic_cast<CudaDevice*>(&store_.device())),
      gpu_groups_(make_gpu_groups(config_, ranks, store_.device(),
                                  store_.address(layout_.scratch, state_->scratch_bytes()))),
      order_(static_cast<uint32_t>(registry_.layers().size())),
      ring_(layout_.weight_ring),
      stored_(layout_.model.layers.size()),
      acquired_(registry_.layers().size()),
      thread_(store_, *state_, ranks, gpu_groups_ ? gpu_groups_->groups() : ranks.groups(),
              {.max_grad_norm = config.max_grad_norm,
               .max_non_finite_steps = config.max_non_finite_steps,
               .log = options_.log,
               .progress = options_.progress,
               .warn = options_.warn}) {
  if (gpu_ != nullptr) state_->attach(*gpu_, store_.address(layout_.scratch));
  for (const SlotId slot : layout_.gradient_ring) sum_slots_.emplace_back().slot = slot;
  for (uint32_t l = 0; l < stored_.size(); ++l) {
    slot_layers_ += needs_slot(l) ? 1 : 0;
    stored_[l].gradient.counts.resize(layout_.model.layers[l].tensors.size());
  }
}

Pager::~Pager() = default;

void Pager::require_running() {
  if (const std::exception_ptr error = thread_.error()) std::rethrow_exception(error);
}

void Pager::drain() {
  thread_.wait(thread_.add({.kind = PagerWork::Kind::task, .task = [] {}}));
}

const RegisteredLayer& Pager::checked_layer(uint32_t layer) const {
  if (layer < registry_.layers().size()) return registry_.layers()[layer];
  refuse(Misuse::bad_argument, "layer {}: layers are numbered from 0 to {}", layer,
         registry_.layers().size() - 1);
}

bool Pager::needs_slot(uint32_t stored) const {
  return layout_.options.gathers_weights() ||
         !layout_.compute_addresses(layout_.page(layout_.weight(stored, 0)));
}

uint64_t Pager::weight_bytes(uint32_t stored) const {
  return layout_.whole(stored) * layout_.options.weight_bytes();
}

const std::byte* Pager::weights(uint32_t stored) {
  if (needs_slot(stored)) return store_.address(ring_.find(stored)->slot);
  const Page& first = layout_.page(layout_.weight(stored, 0));
  return store_.address(first.home_slot, first.home_offset);
}

/// Steps have passed since the layer was brought, whose updates may be pending.
bool Pager::is_behind(uint32_t stored) const {
  return !in_backward() && stored_[stored].updated != steps_ &&
         layout_.model.layers[stored].trainable();
}

}  // namespace overspill
