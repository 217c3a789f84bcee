// Builds a Layout from the chosen homes: chunks, pages, slots, arena offsets.
#include "engine/plan/layout.h"

#include <algorithm>

#include "engine/base/error.h"
#include "engine/base/units.h"
#include "engine/plan/placement.h"

namespace overspill {
namespace {

// By default a block is cut into about 32 chunks, so that reading, updating and writing them
// overlap (bench/update_layer); larger transfers than the upper limit gain nothing.
constexpr uint64_t kChunksOfABlock = 32;
constexpr uint64_t kLeastChunk = uint64_t{1} << 20, kMostChunk = uint64_t{4} << 20;

class LayoutBuilder {
 public:
  LayoutBuilder(const PlacementProblem& problem, const Homes& homes, const SlotPlan& slots)
      : problem_(problem), homes_(homes), plan_(slots) {
    layout_.options = problem.options;
    layout_.model = problem.model;
    layout_.prefetch_depth = problem.prefetch_depth;
    layout_.chunk_parameters = problem.chunk_parameters;
    layout_.table = problem.table;
  }

  Layout build() {
    add_parameter_pages();
    add_activation_pages();
    add_working_slots();
    CHECK(layout_.device_bytes == plan_.device_bytes);
    CHECK(layout_.host_bytes == plan_.host_bytes);
    CHECK(layout_.nvme_bytes == plan_.nvme_bytes);
    return std::move(layout_);
  }

 private:
  SlotId add_slot(Tier memory, uint64_t bytes, const char* role) {
    uint64_t& end = memory == Tier::device ? layout_.device_bytes : layout_.host_bytes;
    layout_.slots.push_back({memory, end, bytes, role});
    end += bytes;
    return {static_cast<uint32_t>(layout_.slots.size()) - 1};
  }

  PageId add_page(Page page) {
    layout_.pages.push_back(page);
    return {static_cast<uint32_t>(layout_.pages.size()) - 1};
  }

  /// One page per chunk; memory homes are one slot per layer, so that its chunks are contiguous.
  template <class PageBytes>
  PageId add_chunk_pages(PageKind kind, uint32_t layer, Tier home, const PageBytes& page_bytes) {
    const PageId first{static_cast<uint32_t>(layout_.pages.size())};
    uint64_t offset = 0;
    for (uint32_t c = 0; c < layout_.chunk_count(layer); ++c) {
      const uint64_t bytes = page_bytes(layout_.chunk(layer, c));
      add_page({kind, layer, c, home, bytes, SlotId{}, offset});
      offset += bytes;
    }
    if (home == Tier::nvme || offset == 0) return first;
    const SlotId slot = add_slot(home, offset, role(kind));
    for (uint32_t c = 0; c < layout_.chunk_count(layer); ++c) {
      layout_.pages[first.value + c].home_slot = slot;
    }
    return first;
  }

  static const char* role(PageKind kind) {
    switch (kind) {
      case PageKind::weight: return "home_weights";
      case PageKind::optimizer: return "home_optimizer";
      case PageKind::gradient: return "home_gradients";
      default: return "home_activations";
    }
  }

  void add_parameter_pages() {
    const PlanOptions& o = layout_.options;
    for (uint32_t l = 0; l < layout_.model.layers.size(); ++l) {
      add_weight_pages(l);
      layout_.first_optimizer.push_back(
          add_chunk_pages(PageKind::optimizer, l, homes_.optimizer[l],
                          [&](const Chunk& chunk) { return optimizer_page_bytes(o, chunk); }));
      assign_records(l);
      add_gradient_pages(l);
      layout_.gradient_sum.push_back(add_page({PageKind::gradient_sum, l, 0, Tier::device,
                                               layout_.whole(l) * sizeof(float), SlotId{}, 0}));
    }
  }

  void add_weight_pages(uint32_t layer) {
    const PlanOptions& o = layout_.options;
    const auto bytes = [&](const Chunk& chunk) { return chunk.parameters * o.weight_bytes(); };
    layout_.first_whole_weight.push_back({static_cast<uint32_t>(layout_.pages.size())});
    if (o.gathers_weights()) add_peer_weights(layer, 0, o.rank);
    layout_.first_weight.push_back(
        add_chunk_pages(PageKind::weight, layer, homes_.weights[layer], bytes));
    if (o.gathers_weights()) add_peer_weights(layer, 1, o.ranks - 1 - o.rank);
  }

  void add_peer_weights(uint32_t layer, uint32_t index, uint64_t peers) {
    if (peers == 0) return;
    const uint64_t bytes = peers * layout_.shard(layer) * layout_.options.weight_bytes();
    add_page({PageKind::peer_weight, layer, index, Tier::device, bytes, SlotId{}, 0});
  }

  /// A chunk's weights and optimizer state are contiguous on NVMe: one read and one write.
  void assign_records(uint32_t layer) {
    for (uint32_t c = 0; c < layout_.chunk_count(layer); ++c) {
      assign_nvme(layout_.pages[layout_.weight(layer, c).value]);
      assign_nvme(layout_.pages[layout_.optimizer(layer, c).value]);
    }
  }

  void assign_nvme(Page& page) {
    if (page.home != Tier::nvme) return;
    page.home_offset = layout_.nvme_bytes;
    layout_.nvme_bytes += page.bytes;
  }

  void add_gradient_pages(uint32_t layer) {
    const auto bytes = [&](const Chunk& chunk) {
      return gradient_page_bytes(layout_.options, chunk);
    };
    if (layout_.options.stores_gradient(layer)) {
      layout_.first_gradient.push_back(
          add_chunk_pages(PageKind::gradient, layer, homes_.gradients[layer], bytes));
      for (uint32_t c = 0; c < layout_.chunk_count(layer); ++c) {
        assign_nvme(layout_.pages[layout_.gradient(layer, c).value]);
      }
      return;
    }
    for (uint32_t c = 0; c < layout_.chunk_count(layer); ++c) {  // consumed at once: no home slot
      const PageId id = add_page(
          {PageKind::gradient, layer, c, Tier::host, bytes(layout_.chunk(layer, c)), SlotId{}, 0});
      if (c == 0) layout_.first_gradient.push_back(id);
    }
  }

  void add_activation_pages() {
    const uint64_t bytes = problem_.activation_page_bytes();
    for (uint32_t l = 0; l < layout_.model.layers.size(); ++l) {
      const Tier home = homes_.activations[l];
      const PageKind kind = l == 0 ? PageKind::activation_gradient : PageKind::activation;
      const SlotId slot =
          home == Tier::nvme ? SlotId{} : add_slot(home, problem_.activation_bytes(), role(kind));
      PageId first;
      for (uint32_t mb = 0; mb < layout_.options.micro_batches; ++mb) {
        const PageId id = add_page({kind, l, mb, home, bytes, slot, mb * bytes});
        assign_nvme(layout_.pages[id.value]);
        if (mb == 0) first = id;
      }
      layout_.first_activation.push_back(first);
      if (l == 0) layout_.first_activation_gradient = first;
    }
  }

  void add_working_slots() {
    const auto add = [&](std::vector<SlotId>& out, uint32_t count, Tier memory, uint64_t bytes,
                         const char* name) {
      for (uint32_t i = 0; i < count; ++i) out.push_back(add_slot(memory, bytes, name));
    };
    add(layout_.weight_ring, plan_.weight_ring, Tier::device, plan_.ring_bytes, "weights");
    add(layout_.gradient_ring, plan_.gradient_ring, Tier::device, plan_.gradient_sum_bytes,
        "gradient_sum");
    if (plan_.tied_gradient_bytes > 0) {
      layout_.tied_gradient = add_slot(Tier::device, plan_.tied_gradient_bytes, "gradient_sum");
    }
    add(layout_.activation_slots, plan_.activation_slots, Tier::device, plan_.activation_bytes,
        "activation");
    add(layout_.device_stages, plan_.device_stages, Tier::device, plan_.stage_bytes, "stage");
    layout_.scratch = add_slot(Tier::device, layout_.options.compute_scratch_bytes, "scratch");
    add(layout_.stages, plan_.stages, Tier::host, plan_.stage_bytes, "stage");
    add(layout_.records, plan_.records, Tier::host, plan_.record_bytes, "record");
    add(layout_.activation_stages, plan_.activation_stages, Tier::host, plan_.activation_bytes,
        "activation_stage");
    if (plan_.factored_bytes > 0) {
      layout_.factored = add_slot(Tier::host, plan_.factored_bytes, "factored_moments");
    }
    if (plan_.batch_bytes > 0) layout_.batch = add_slot(Tier::host, plan_.batch_bytes, "batch");
  }

  const PlacementProblem& problem_;
  const Homes& homes_;
  const SlotPlan& plan_;
  Layout layout_;
};

}  // namespace

uint64_t choose_chunk_parameters(const ModelShape& model, const PlanOptions& options) {
  if (options.chunk_parameters) {
    if (*options.chunk_parameters == 0 || *options.chunk_parameters % kParameterAlignment != 0) {
      fail(ErrorCode::invalid_config,
           "offload.chunk_parameters: {} is not a positive multiple of {}; try {}",
           *options.chunk_parameters, kParameterAlignment,
           round_up(std::max<uint64_t>(*options.chunk_parameters, 1), kParameterAlignment));
    }
    return *options.chunk_parameters;
  }
  uint64_t largest = 0;
  for (const LayerShape& layer : model.layers) {
    largest = std::max(largest, shard_parameters(layer, options.ranks));
  }
  const LayerShape& block = model.layers[std::min<size_t>(1, model.head())];
  const uint64_t share = shard_parameters(block, options.ranks) / kChunksOfABlock;
  uint64_t chunk = std::clamp(round_up(share, kParameterAlignment), kLeastChunk, kMostChunk);
  chunk = std::min(chunk, largest);
  // Small host budgets get small slots: enough of each to pipeline must leave half of it for homes.
  const StateLayout state = state_layout(options.update_rule(), kParameterAlignment, 0);
  const uint64_t per_parameter =
      6 * options.weight_bytes() + 4 * ceil_div(state.bytes, kParameterAlignment);
  while (chunk > kParameterAlignment && chunk * per_parameter > options.host_memory / 2) {
    chunk = round_up(chunk / 2, kParameterAlignment);
  }
  return chunk;
}

OptimizerSettings PlanOptions::update_rule() const {
  OptimizerSettings rule = optimizer_settings;
  rule.master = precision == Precision::bf16 ? MasterFormat::split : MasterFormat::float32;
  return rule;
}

std::string describe_sharing(const PlanOptions& o) {
  if (o.world() == 1) return "";
  if (o.ranks == 1) return fmt::format("{} ranks with all of the state each (ZeRO-0)", o.replicas);
  const char* what = o.shard_weights ? "each layer's parameters" : "gradients and optimizer state";
  const std::string copies =
      o.replicas > 1 ? fmt::format(", {} such groups", o.replicas) : std::string();
  return fmt::format("{} ranks share {} (ZeRO-{}){}", o.ranks, what,
                     o.shard_weights ? "3" : "1 and 2", copies);
}

BatchArea::BatchArea(const PlanOptions& o, size_t layers) {
  const uint64_t ids = round_up(o.micro_batches * o.micro_batch_tokens * sizeof(int32_t), 64);
  targets = tokens + ids;
  document_begins = targets + ids;
  losses = document_begins + ids;
  squares = losses + o.micro_batches * sizeof(double);
  bytes = round_up(squares + layers * sizeof(double), 4096);
}

StateLayout chunk_state(const PlanOptions& options, const Chunk& chunk) {
  if (!chunk.trainable()) return {};
  return state_layout(options.update_rule(), chunk.parameters, chunk.exact);
}

uint64_t optimizer_page_bytes(const PlanOptions& options, const Chunk& chunk) {
  return round_up(chunk_state(options, chunk).bytes, 4096);
}

uint64_t gradient_page_bytes(const PlanOptions& options, const Chunk& chunk) {
  const uint64_t bytes = options.pages_sums(chunk.layer) ? sizeof(float) : options.gradient_bytes();
  return chunk.trainable() ? chunk.parameters * bytes : 0;
}

bool updates_twice(const ModelShape& model, const PlanOptions& options, uint32_t layer,
                   Tier weights, Tier optimizer) {
  if (options.update_twice.empty() || !options.update_twice[layer]) return false;
  const bool tied_embedding = layer == 0 && model.config.tie_word_embeddings;
  return model.layers[layer].trainable() && !tied_embedding && weights == Tier::nvme &&
         optimizer == Tier::nvme;
}

std::vector<uint32_t> Layout::layers_updated_twice() const {
  std::vector<uint32_t> layers;
  for (uint32_t l = 0; l < model.layers.size(); ++l) {
    if (updates_twice(l)) layers.push_back(l);
  }
  return layers;
}

uint64_t Layout::trained_parameters(uint32_t layer) const {
  uint64_t trained = 0;
  for (uint32_t c = 0; c < chunk_count(layer); ++c) {
    for (const UpdateRun& run : runs(chunk(layer, c))) trained += run.end - run.begin;
  }
  return trained;
}

uint64_t Layout::home_bytes(PageKind kind, Tier tier) const {
  uint64_t bytes = 0;
  for (const Page& page : pages) {
    const bool has_home = page.home == Tier::nvme || page.home_slot != SlotId{};
    if (page.kind == kind && page.home == tier && has_home) bytes += page.bytes;
  }
  return bytes;
}

Layout build_layout(const PlacementProblem& problem, const Homes& homes, const SlotPlan& slots) {
  return LayoutBuilder(problem, homes, slots).build();
}

Layout plan_layout(const ModelShape& model, const PlanOptions& options) {
  CHECK(options.compute_scratch_bytes % 4096 == 0);
  CHECK(options.rank < options.ranks);
  CHECK(options.update_twice.empty() || options.update_twice.size() == model.layers.size());
  for (const PlacedKind& kind : kPlacedKinds) {
    CHECK(!options.homes || (*options.homes.*kind.homes).size() == model.layers.size());
  }
  if (options.update == UpdateTiming::in_backward &&
      std::ranges::find(options.update_twice, true) != options.update_twice.end()) {
    fail(ErrorCode::invalid_config,
         "updating twice splits the update of the next forward; with offload.update: in_backward "
         "there is none to split");
  }
  const uint64_t chunk = choose_chunk_parameters(model, options);
  const ChunkTable table = cut_chunks(model, chunk, options.optimizer_settings, options.rank_of());
  const auto build = [&](uint32_t depth) {
    const PlacementProblem problem(model, options, table, depth, chunk);
    bool generous = true;
    const Homes homes = choose_homes(problem, generous);
    return build_layout(problem, homes, plan_slots(problem, homes, generous));
  };
  if (options.prefetch_depth) return build(*options.prefetch_depth);
  try {
    return build(1);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::does_not_fit) throw;
    return build(0);
  }
}

}  // namespace overspill
