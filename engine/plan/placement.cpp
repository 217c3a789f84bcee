// Greedy placement: saved traffic per byte of memory, weights first, then gradients and moments,
// then activations. Totals are computed per layer, so that hundreds of trials cost nothing.
#include "engine/plan/placement.h"

#include <algorithm>
#include <array>

#include "engine/base/error.h"
#include "engine/base/units.h"
#include "nvme/volume.h"

namespace overspill {
namespace {

/// What the swap files of a plan take.
uint64_t file_bytes(const PlanOptions& o, const SlotPlan& plan) {
  if (plan.nvme_bytes == 0) return 0;
  return volume_file_bytes(plan.nvme_bytes, o.nvme_files, o.nvme_stripe_bytes, o.nvme_shares);
}

bool fits(const PlacementProblem& p, const SlotPlan& plan) {
  return plan.allowed && plan.device_bytes <= p.options.device_memory &&
         plan.host_bytes <= p.options.host_memory &&
         (p.options.nvme_available || plan.nvme_bytes == 0) &&
         file_bytes(p.options, plan) <= p.options.nvme_capacity;
}

Tier base_tier(Placement placement, Tier automatic) {
  switch (placement) {
    case Placement::automatic: return automatic;
    case Placement::device: return Tier::device;
    case Placement::host: return Tier::host;
    case Placement::nvme: return Tier::nvme;
  }
  return automatic;
}

Homes uniform_homes(const PlacementProblem& p, const std::array<Tier, 4>& automatic) {
  Homes homes;
  for (size_t k = 0; k < kPlacedKinds.size(); ++k) {
    const Tier tier = base_tier(p.options.*kPlacedKinds[k].placement, automatic[k]);
    (homes.*kPlacedKinds[k].homes).assign(p.model.layers.size(), tier);
  }
  return homes;
}

/// Promotes auto-placed layers to the tier while everything still fits.
void promote(const PlacementProblem& p, Homes& homes, Tier tier, bool generous) {
  for (const PlacedKind& kind : kPlacedKinds) {
    if (p.options.*kind.placement != Placement::automatic) continue;
    for (Tier& home : homes.*kind.homes) {
      if (home != Tier::nvme) continue;
      home = tier;
      if (!fits(p, plan_slots(p, homes, generous))) home = Tier::nvme;
    }
  }
}

[[noreturn]] void refuse(const PlacementProblem& p, const SlotPlan& least) {
  const PlanOptions& o = p.options;
  const auto shortage = [&](const char* key, uint64_t budget, uint64_t need, const char* inside,
                            const char* other) {
    fail(ErrorCode::does_not_fit,
         "offload.{} of {} is {} short: the run needs at least {} there ({}); set offload.{}: "
         "{}MiB{}",
         key, format_bytes(budget), format_bytes(need - budget), format_bytes(need), inside, key,
         ceil_div(need, kMiB), other);
  };
  if (least.device_bytes > o.device_memory) {
    const std::string inside = fmt::format(
        "{} weight buffers of {}, {} gradient buffers of {}, kernel scratch {}, the rest state "
        "placed "
        "on the device",
        least.weight_ring, format_bytes(least.ring_bytes), least.gradient_ring,
        format_bytes(least.gradient_sum_bytes), format_bytes(o.compute_scratch_bytes));
    shortage("device_memory", o.device_memory, least.device_bytes, inside.c_str(),
             ", or lower micro_batch_size or offload.prefetch_depth");
  }
  if (least.host_bytes > o.host_memory) {
    const std::string inside = fmt::format(
        "{} chunk slots of {}, {} optimizer slots of {}, the rest state placed in host "
        "memory",
        least.stages, format_bytes(least.stage_bytes), least.records,
        format_bytes(least.record_bytes));
    const char* other = !o.nvme_available ? ", or give offload.nvme_paths so that state can spill"
                                          : ", or lower offload.chunk_parameters";
    shortage("host_memory", o.host_memory, least.host_bytes, inside.c_str(), other);
  }
  const std::string inside =
      fmt::format("{} of state in whole stripes of {} over {} swap files",
                  format_bytes(least.nvme_bytes), format_bytes(o.nvme_stripe_bytes), o.nvme_files);
  shortage("nvme_capacity", o.nvme_capacity, file_bytes(o, least), inside.c_str(),
           ", or raise offload.host_memory");
  std::abort();
}

void check_drive(const PlanOptions& o) {
  if (o.nvme_available) return;
  for (const PlacedKind& kind : kPlacedKinds) {
    const bool asked = o.homes ? std::ranges::count(*o.homes.*kind.homes, Tier::nvme) > 0
                               : o.*kind.placement == Placement::nvme;
    if (!asked) continue;
    fail(ErrorCode::invalid_config,
         "offload.{}: nvme needs a drive; set offload.nvme_paths to a directory on one", kind.key);
  }
}

}  // namespace

PlacementProblem::PlacementProblem(const ModelShape& shape, const PlanOptions& plan_options,
                                   const ChunkTable& chunks, uint32_t depth,
                                   uint64_t parameters_of_chunk)
    : model(shape),
      options(plan_options),
      table(chunks),
      prefetch_depth(depth),
      chunk_parameters(parameters_of_chunk),
      optimizer_bytes(shape.layers.size()),
      gradient_bytes(shape.layers.size()) {
  for (const Chunk& chunk : table.chunks) {
    const uint64_t record = optimizer_page_bytes(options, chunk);
    optimizer_bytes[chunk.layer] += record;
    record_bytes = std::max(record_bytes, record);
    if (!options.stores_gradient(chunk.layer)) continue;
    gradient_bytes[chunk.layer] += gradient_page_bytes(options, chunk);
  }
}

uint64_t PlacementProblem::weight_bytes(uint32_t layer) const {
  const uint64_t whole = whole_weight_bytes(layer);
  return options.shard_weights ? whole / options.ranks : whole;
}
uint64_t PlacementProblem::whole_weight_bytes(uint32_t layer) const {
  const uint64_t shard = shard_parameters(model.layers[layer], options.ranks);
  return shard * options.ranks * options.weight_bytes();
}
uint64_t PlacementProblem::gradient_sum_bytes(uint32_t layer) const {
  return whole_weight_bytes(layer) / options.weight_bytes() * sizeof(float);
}
uint64_t PlacementProblem::activation_page_bytes() const {
  return round_up(options.micro_batch_tokens * model.config.hidden_size * options.activation_bytes,
                  4096);
}
uint64_t PlacementProblem::activation_bytes() const {
  return activation_page_bytes() * options.micro_batches;
}
uint32_t PlacementProblem::max_chunks() const {
  return max_own_chunks() * (options.shard_weights ? 1 : options.ranks);
}
uint32_t PlacementProblem::max_own_chunks() const {
  uint64_t largest = 0;
  for (const LayerShape& layer : model.layers) {
    largest = std::max(largest, shard_parameters(layer, options.ranks));
  }
  return static_cast<uint32_t>(ceil_div(largest, chunk_parameters));
}

SlotPlan plan_slots(const PlacementProblem& p, const Homes& homes, bool generous) {
  const PlanOptions& o = p.options;
  const bool unified = o.unified;
  const uint32_t layers = static_cast<uint32_t>(p.model.layers.size());
  const bool tied = p.model.config.tie_word_embeddings;
  SlotPlan plan;
  uint32_t ring_layers = 0;
  const bool in_backward = o.update == UpdateTiming::in_backward;
  bool stage = in_backward && (o.precision == Precision::bf16 || !unified);
  bool record = false, activation_slot = false, activation_stage = false, device_stage = false;

  const auto place = [&](Tier tier, uint64_t bytes) {
    (tier == Tier::device ? plan.device_bytes
     : tier == Tier::host ? plan.host_bytes
                          : plan.nvme_bytes) += bytes;
  };
  const auto addressable = [&](Tier tier) {
    return tier == Tier::device || (unified && tier == Tier::host);
  };
  // The parts of several ranks come together in the ring, wherever this rank's is at home.
  const auto ringed = [&](Tier tier) { return o.gathers_weights() || !addressable(tier); };
  for (uint32_t l = 0; l < layers; ++l) {
    const Tier w = homes.weights[l], g = homes.gradients[l], opt = homes.optimizer[l];
    place(w, p.weight_bytes(l));
    place(opt, p.optimizer_bytes[l]);
    place(g, p.gradient_bytes[l]);
    place(homes.activations[l], p.activation_bytes());
    if (p.model.layers[l].trainable()) {
      plan.gradient_sum_bytes = std::max(plan.gradient_sum_bytes, p.gradient_sum_bytes(l));
    }
    const bool updates_on_device = !unified && opt == Tier::device;
    plan.allowed &= !(o.updates_on_host && updates_on_device && p.optimizer_bytes[l] > 0);
    if (ringed(w)) {
      ++ring_layers;
      plan.ring_bytes = std::max(plan.ring_bytes, p.whole_weight_bytes(l));
    }
    // A repeated update finds old weights where they are in nobody's way.
    stage |= updates_twice(p.model, o, l, w, opt);
    // Checkpoints reach discrete device memory through a host slot.
    if (p.optimizer_bytes[l] > 0) {
      record |= opt == Tier::nvme || (!unified && opt == Tier::device);
    }
    if (p.gradient_bytes[l] > 0) {
      stage |= g == Tier::nvme;
      stage |= !unified && g == Tier::device && !updates_on_device;
      device_stage |= updates_on_device && g != Tier::device;
    }
    stage |= !unified && w != Tier::host;
    activation_slot |= !addressable(homes.activations[l]);
    activation_stage |= !unified && homes.activations[l] == Tier::nvme;
  }

  const uint32_t depth = p.prefetch_depth;
  const bool tied_extra = tied && ringed(homes.weights[0]);
  plan.weight_ring = std::min(ring_layers, depth + o.held_layers + (tied_extra ? 1u : 0u));
  plan.gradient_ring = generous && depth > 0 ? 2 : 1;
  if (tied && p.model.layers[0].trainable()) {
    plan.tied_gradient_bytes = p.gradient_sum_bytes(0);
  }
  plan.activation_bytes = p.activation_page_bytes();
  if (activation_slot) plan.activation_slots = generous ? o.micro_batches + 2 + depth : 2;
  const bool sums = std::ranges::find(o.paged_sums, 1) != o.paged_sums.end();
  plan.stage_bytes = p.chunk_parameters * (sums ? sizeof(float) : o.weight_bytes());
  plan.record_bytes = p.record_bytes;
  const auto roomy = [&](bool needed, uint32_t least, uint32_t wanted, uint64_t bytes) -> uint32_t {
    if (!needed) return 0;
    if (!generous) return least;
    const uint64_t room = o.host_memory / 5 / std::max<uint64_t>(bytes, 1);
    return static_cast<uint32_t>(std::clamp<uint64_t>(room, least, std::max(least, wanted)));
  };
  const auto asked = [](uint32_t slots, uint32_t least, const std::optional<uint32_t>& wish) {
    return slots > 0 && wish ? std::max(least, *wish) : slots;
  };
  plan.stages =
      asked(roomy(stage, 2, 3 + (depth + 1) * p.max_chunks(), plan.stage_bytes), 2, o.stage_slots);
  plan.records =
      asked(roomy(record, 1, 3 + depth * p.max_own_chunks(), plan.record_bytes), 1, o.record_slots);
  plan.activation_stages = roomy(activation_stage, 1, 2 + depth, plan.activation_bytes);
  if (device_stage) plan.device_stages = 2;
  plan.factored_bytes = round_up(p.table.factored_elements * kFactoredElementBytes, 4096);
  if (o.streams) plan.batch_bytes = BatchArea(o, layers).bytes;

  plan.device_bytes += plan.weight_ring * plan.ring_bytes +
                       plan.gradient_ring * plan.gradient_sum_bytes + plan.tied_gradient_bytes +
                       plan.activation_slots * plan.activation_bytes +
                       plan.device_stages * plan.stage_bytes + o.compute_scratch_bytes;
  plan.host_bytes += plan.stages * plan.stage_bytes + plan.records * plan.record_bytes +
                     plan.activation_stages * plan.activation_bytes + plan.factored_bytes +
                     plan.batch_bytes;
  return plan;
}

std::optional<bool> fits_generously(const PlacementProblem& p, const Homes& homes) {
  for (const bool generous : {true, false}) {
    if (fits(p, plan_slots(p, homes, generous))) return generous;
  }
  return std::nullopt;
}

Homes choose_homes(const PlacementProblem& p, bool& generous) {
  const PlanOptions& o = p.options;
  check_drive(o);
  if (o.homes) {
    const std::optional<bool> fitting = fits_generously(p, *o.homes);
    if (!fitting) refuse(p, plan_slots(p, *o.homes, false));
    generous = *fitting;
    return *o.homes;
  }
  constexpr Tier D = Tier::device, H = Tier::host, N = Tier::nvme;
  // Everything in memory, as near to the compute as possible. Order: weights, gradients, optimizer,
  // activations.
  constexpr std::array<std::array<Tier, 4>, 5> kResident = {
      {{D, D, D, D}, {D, D, H, D}, {D, H, H, D}, {H, H, H, D}, {H, H, H, H}}};
  for (const bool room : {true, false}) {
    for (const auto& tiers : kResident) {
      Homes homes = uniform_homes(p, tiers);
      generous = room;
      if (fits(p, plan_slots(p, homes, room))) return homes;
    }
  }
  const Tier fallback = o.nvme_available ? N : H;
  Homes homes = uniform_homes(p, {fallback, fallback, fallback, fallback});
  for (const bool room : {true, false}) {
    generous = room;
    if (!fits(p, plan_slots(p, homes, room))) continue;
    promote(p, homes, D, room);
    promote(p, homes, H, room);
    return homes;
  }
  refuse(p, plan_slots(p, homes, false));
}

}  // namespace overspill
