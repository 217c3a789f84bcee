// Where everything lives: chunks, pages and their home tiers, slots, and the size of each arena.
// A Layout is fixed for a run; every Program of the run uses its slots and pages. Pure data.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/collective/collective.h"
#include "engine/model/layers.h"
#include "engine/plan/chunks.h"
#include "engine/program/program.h"

namespace overspill {

enum class Precision : uint8_t { bf16, float32 };
enum class Placement : uint8_t { automatic, device, host, nvme };
enum class UpdateTiming : uint8_t { next_forward, in_backward };

/// A home tier per layer for each kind of page. activations[0] is the activation gradients' home.
struct Homes {
  std::vector<Tier> weights, optimizer, gradients, activations;
  bool operator==(const Homes&) const = default;
};

/// The planner's inputs beside the model.
struct PlanOptions {
  Precision precision = Precision::bf16;
  uint32_t micro_batches = 1;
  uint64_t micro_batch_tokens = 0;  ///< micro_batch_size * sequence_len
  uint64_t sequence_len = 0;
  uint64_t compute_scratch_bytes = 0;  ///< what the kernels need, in the device arena
  uint32_t activation_bytes = 4;       ///< of an element of activations
  /// The device works through streams: batches and results pass through pinned host memory.
  bool streams = false;
  bool updates_on_host = false;  ///< of a discrete device too: it keeps no optimizer state
  bool unified = true;           ///< device and host share memory: no h2d, no d2h
  uint64_t device_memory = 0;    ///< budgets in bytes
  uint64_t host_memory = 0;
  uint64_t nvme_capacity = UINT64_MAX;
  bool nvme_available = false;
  uint32_t nvme_files = 1;  ///< the state is striped over them
  uint64_t nvme_stripe_bytes = 1 << 20;
  std::vector<uint32_t> nvme_shares{};  ///< stripes of each file in turn; empty: one each
  Placement weights = Placement::automatic;
  Placement optimizer = Placement::automatic;
  Placement gradients = Placement::automatic;
  Placement activations = Placement::automatic;
  std::optional<Homes> homes{};            ///< instead of the four placements: every layer's home
  std::optional<uint32_t> prefetch_depth;  ///< default: 1, or 0 where 1 does not fit
  std::optional<uint64_t> chunk_parameters;
  std::optional<uint32_t> record_slots;  ///< host slots of a chunk's optimizer page each
  std::optional<uint32_t> stage_slots;   ///< host slots of a chunk's weights or gradient each
  UpdateTiming update = UpdateTiming::next_forward;
  /// By layer, with next_forward: whether it is updated twice, in the forward without writing and
  /// again in the backward (docs/decisions/011-update-twice.md). Empty: none. Layers that cannot
  /// are updated once (updates_twice()).
  std::vector<char> update_twice{};
  /// The ranks that share one copy of the state, and this one's place among them: it owns its part
  /// of every layer's optimizer state and gradients (shard_parameters) and, with shard_weights, of
  /// the weights. ZeRO-0 is one rank and its replicas.
  uint32_t ranks = 1;
  uint32_t rank = 0;
  bool shard_weights = true;  ///< ZeRO-3: else every rank keeps all weights
  uint32_t replicas = 1;      ///< copies of the state; gradients are summed over them
  uint32_t replica = 0;       ///< this one
  ReduceType reduce_type = ReduceType::bf16;

  OptimizerSettings optimizer_settings{};  ///< `master` follows the precision
  uint32_t held_layers = 1;                ///< whose weights are in use at once
  /// By layer: gradient pages hold its float32 sums as well, as long as these are not complete.
  /// Empty: none.
  std::vector<char> paged_sums{};

  /// This rank among those that share the state.
  RankOf rank_of() const { return {rank, ranks, !shard_weights}; }
  uint32_t world() const { return ranks * replicas; }
  /// Weights come together from several ranks before they are used.
  bool gathers_weights() const { return ranks > 1 && shard_weights; }
  /// The settings with the precision's master.
  OptimizerSettings update_rule() const;
  uint32_t weight_bytes() const { return precision == Precision::bf16 ? 2 : 4; }
  uint32_t gradient_bytes() const { return weight_bytes(); }
  bool pages_sums(uint32_t layer) const { return !paged_sums.empty() && paged_sums[layer] != 0; }
  /// Whether the layer's gradient has pages with a home.
  bool stores_gradient(uint32_t layer) const {
    return update == UpdateTiming::next_forward || pages_sums(layer);
  }
  uint32_t reduce_bytes() const { return reduce_type == ReduceType::bf16 ? 2 : 4; }
};

/// Who keeps what, where there are several ranks; empty for one.
std::string describe_sharing(const PlanOptions& options);

/// Whether a layer whose state lives in these tiers is updated twice, where that was asked for:
/// both must be on NVMe, and a tied embedding never is, because the head loads it from its home
/// between the two.
bool updates_twice(const ModelShape& model, const PlanOptions& options, uint32_t layer,
                   Tier weights, Tier optimizer);

/// Where a step's tokens and results pass between host and device: byte offsets in Layout::batch.
struct BatchArea {
  explicit BatchArea(const PlanOptions& options, size_t layers);
  uint64_t tokens = 0, targets, document_begins;  ///< int32 of all micro-batches
  uint64_t losses;                                ///< a double per micro-batch
  uint64_t squares;                               ///< a double per layer
  uint64_t bytes;                                 ///< a multiple of 4096
};

/// Where the arrays of a chunk's optimizer page lie.
StateLayout chunk_state(const PlanOptions& options, const Chunk& chunk);
/// Bytes of a chunk's pages, multiples of 4096; 0 where there is nothing to keep.
uint64_t optimizer_page_bytes(const PlanOptions& options, const Chunk& chunk);
uint64_t gradient_page_bytes(const PlanOptions& options, const Chunk& chunk);

struct Layout {
  PlanOptions options;
  ModelShape model;
  uint32_t prefetch_depth = 0;
  uint64_t chunk_parameters = 0;
  ChunkTable table;
  std::vector<Page> pages;
  std::vector<Slot> slots;

  std::vector<PageId> first_weight;  ///< per layer; a layer's chunks follow each other
  /// Per layer: the first page of its whole weights, which are the other ranks' before, this
  /// rank's chunks, the other ranks' behind. Where every rank keeps all weights: first_weight.
  std::vector<PageId> first_whole_weight;
  std::vector<PageId> first_optimizer;
  std::vector<PageId> first_gradient;    ///< empty when updates run in the backward
  std::vector<PageId> gradient_sum;      ///< per layer
  std::vector<PageId> first_activation;  ///< per layer > 0: its input, by micro-batch
  PageId first_activation_gradient;

  std::vector<SlotId> weight_ring;        ///< device: one layer's weights each
  std::vector<SlotId> gradient_ring;      ///< device: one layer's float32 gradient sums each
  SlotId tied_gradient;                   ///< device: the embedding's sums, when tied
  std::vector<SlotId> activation_slots;   ///< device: working copies of activation pages
  std::vector<SlotId> device_stages;      ///< device: gradient chunks, when updates run there
  std::vector<SlotId> stages;             ///< host: one chunk's weights or gradient each
  std::vector<SlotId> records;            ///< host: one chunk's optimizer page each
  std::vector<SlotId> activation_stages;  ///< host: an activation between device and NVMe
  SlotId scratch;                         ///< device: kernel scratch
  SlotId factored;                        ///< host: FactoredMoments, where the optimizer has any
  SlotId batch;                           ///< host: a BatchArea, where the device has streams

  uint64_t device_bytes = 0;
  uint64_t host_bytes = 0;
  uint64_t nvme_bytes = 0;

  /// Parameters of a layer that this rank owns, and with those of all ranks.
  uint64_t shard(uint32_t layer) const {
    return shard_parameters(model.layers[layer], options.ranks);
  }
  uint64_t whole(uint32_t layer) const { return shard(layer) * options.ranks; }
  /// Of those that this rank owns, the ones that train.
  uint64_t trained_parameters(uint32_t layer) const;
  /// Pages of a layer's whole weights.
  uint32_t whole_weight_count(uint32_t layer) const {
    if (!options.gathers_weights()) return chunk_count(layer);
    return chunk_count(layer) + (options.rank > 0) + (options.rank + 1 < options.ranks);
  }
  /// The chunks that this rank owns: [first, first + count).
  uint32_t first_own_chunk(uint32_t layer) const {
    return options.shard_weights ? 0 : options.rank * own_chunk_count(layer);
  }
  uint32_t own_chunk_count(uint32_t layer) const {
    return chunk_count(layer) / (options.shard_weights ? 1 : options.ranks);
  }
  /// Whether the other ranks' new weights come here behind a layer's update (ZeRO-1 and 2).
  bool gathers_updates(uint32_t layer) const {
    return options.ranks > 1 && !options.shard_weights && model.layers[layer].trainable();
  }
  bool owns(const Chunk& chunk) const { return chunk.owner == options.rank; }
  std::vector<uint32_t> layers_updated_twice() const;
  bool updates_twice(uint32_t layer) const {
    return overspill::updates_twice(model, options, layer, page(weight(layer, 0)).home,
                                    page(optimizer(layer, 0)).home);
  }
  uint32_t chunk_count(uint32_t layer) const { return table.first[layer + 1] - table.first[layer]; }
  const Chunk& chunk(uint32_t layer, uint32_t index) const {
    return table.chunks[table.first[layer] + index];
  }
  std::span<const UpdateRun> runs(const Chunk& chunk) const {
    return {table.runs.data() + chunk.first_run, chunk.run_count};
  }
  /// The layer's matrices with factored moments.
  std::span<const FactoredMatrix> matrices(uint32_t layer) const { return table.matrices[layer]; }
  /// Where the arrays of a chunk's optimizer page lie; empty when all of the chunk is frozen.
  StateLayout state(const Chunk& chunk) const { return chunk_state(options, chunk); }
  PageId weight(uint32_t layer, uint32_t c) const { return {first_weight[layer].value + c}; }
  PageId optimizer(uint32_t layer, uint32_t c) const { return {first_optimizer[layer].value + c}; }
  PageId gradient(uint32_t layer, uint32_t c) const { return {first_gradient[layer].value + c}; }
  PageId activation(uint32_t layer, uint32_t mb) const {
    return {first_activation[layer].value + mb};
  }
  PageId activation_gradient(uint32_t mb) const { return {first_activation_gradient.value + mb}; }
  const Page& page(PageId id) const { return pages[id.value]; }
  const Slot& slot(SlotId id) const { return slots[id.value]; }
  /// True when kernels on the compute lane can address a page at its home.
  bool compute_addresses(const Page& page) const {
    return page.home == Tier::device || (options.unified && page.home == Tier::host);
  }
  /// Bytes of pages of a kind whose home is the tier.
  uint64_t home_bytes(PageKind kind, Tier tier) const;
};

/// Chooses slots, and homes where the options have none, within the budgets. Throws
/// Error(does_not_fit) saying what is short, by how much, and which setting would make it fit;
/// Error(invalid_config) for impossible placements.
Layout plan_layout(const ModelShape& model, const PlanOptions& options);

}  // namespace overspill
