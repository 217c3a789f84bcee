// Registering layers, planning, and what the plan says.
#include "bindings/c/engine.h"
#include "engine/base/units.h"

namespace overspill {
namespace {

const osp_tensor_t kTensorDefaults = OSP_TENSOR_INIT;
constexpr uint32_t kMostRank = 64;

/// The next of an array whose elements may be of an older and shorter version.
const osp_tensor_t* next_tensor(const osp_tensor_t* tensor) {
  return reinterpret_cast<const osp_tensor_t*>(reinterpret_cast<const char*>(tensor) +
                                               tensor->size);
}

TensorDescription description_of(const osp_tensor_t& tensor, const Engine& engine) {
  require_pointer(tensor.name, "tensors[].name");
  if (tensor.rank > kMostRank) {
    refuse(Misuse::bad_argument, "tensor \"{}\": rank {}; at most {}", tensor.name, tensor.rank,
           kMostRank);
  }
  if (tensor.rank > 0) require_pointer(tensor.shape, "tensors[].shape");
  const DType own = dtype_of(OSP_DTYPE_DEFAULT, engine), given = dtype_of(tensor.dtype, engine);
  if (own != given) {
    refuse(
        Misuse::dtype_mismatch,
        "tensor \"{}\" is {}, and the engine's weights are {}; register it as OSP_DTYPE_DEFAULT, "
        "or set precision in the configuration",
        tensor.name, dtype_name(given), dtype_name(own));
  }
  if (tensor.decay < -1 || tensor.decay > 1) {
    refuse(Misuse::bad_argument, "tensor \"{}\": decay {}: 1, 0 or -1", tensor.name, tensor.decay);
  }
  constexpr uint32_t kMostGroups = 1 << 16;
  if (tensor.group >= kMostGroups) {
    refuse(Misuse::bad_argument, "tensor \"{}\": group {}: below {}", tensor.name, tensor.group,
           kMostGroups);
  }
  TensorDescription description{.name = tensor.name,
                                .shape = {tensor.shape, tensor.shape + tensor.rank},
                                .group = tensor.group,
                                .frozen = tensor.frozen != 0};
  if (tensor.decay >= 0) description.decay = tensor.decay == 1;
  if (tensor.tied_to != nullptr) description.tied_to = tensor.tied_to;
  return description;
}

/// The state has raw devices to itself.
void require_no_raw_device(const Engine& engine) {
  if (engine.options.activation_nvme_bytes == 0) return;
  for (const auto& path : engine.config.offload.nvme_paths) {
    std::error_code ignored;
    if (!std::filesystem::is_block_file(path, ignored)) continue;
    refuse(Misuse::bad_argument,
           "activation_nvme_bytes, and {} in offload.nvme_paths is a raw device, which the state "
           "has to itself; use directories, or host memory for activations",
           path.string());
  }
}

void require_open(const Engine& engine) {
  if (!engine.finalized) return;
  refuse(Misuse::already_finalized, "osp_finalize was called: the layers are fixed");
}

osp_plan_t plan_of(const Layout& layout) {
  osp_plan_t plan = OSP_PLAN_INIT;
  plan.layers = static_cast<uint32_t>(layout.model.layers.size());
  plan.parameters = layout.model.parameters();
  for (const LayerShape& layer : layout.model.layers) {
    plan.trainable_parameters += layer.trainable_parameters();
  }
  plan.device_bytes = layout.device_bytes;
  plan.host_bytes = layout.host_bytes;
  plan.nvme_bytes = layout.nvme_bytes;
  for (size_t t = 0; t < 3; ++t) {
    const auto tier = static_cast<Tier>(t);
    plan.weight_bytes[t] = layout.home_bytes(PageKind::weight, tier);
    plan.gradient_bytes[t] = layout.home_bytes(PageKind::gradient, tier);
    plan.optimizer_bytes[t] = layout.home_bytes(PageKind::optimizer, tier);
  }
  plan.prefetch_depth = layout.prefetch_depth;
  plan.weight_slots = static_cast<uint32_t>(layout.weight_ring.size());
  return plan;
}

std::string describe(const Layout& layout) {
  const PlanOptions& o = layout.options;
  std::string text = fmt::format(
      "{} parameters in {} layers; device {} of {}, host {} of {}, nvme {}; prefetch depth {}, {} "
      "weight slots\n",
      format_count(layout.model.parameters()), layout.model.layers.size(),
      format_bytes(layout.device_bytes), format_bytes(o.device_memory),
      format_bytes(layout.host_bytes), format_bytes(o.host_memory), format_bytes(layout.nvme_bytes),
      layout.prefetch_depth, layout.weight_ring.size());
  constexpr std::pair<PageKind, const char*> kKinds[] = {{PageKind::weight, "weights"},
                                                         {PageKind::gradient, "gradients"},
                                                         {PageKind::optimizer, "optimizer state"}};
  for (const auto& [kind, name] : kKinds) {
    std::string homes;
    for (const Tier tier : {Tier::device, Tier::host, Tier::nvme}) {
      const uint64_t bytes = layout.home_bytes(kind, tier);
      if (bytes > 0) homes += fmt::format(" {} {}", tier_name(tier), format_bytes(bytes));
    }
    text += fmt::format("{}:{}\n", name, homes.empty() ? " none kept" : homes);
  }
  const std::string sharing = describe_sharing(o);
  return sharing.empty() ? text : text + sharing + "\n";
}

osp_tier_t tier_of(Tier tier) { return static_cast<osp_tier_t>(tier); }

osp_layer_info_t layer_info(const Pager& pager, const RegisteredLayer& layer) {
  osp_layer_info_t info = OSP_LAYER_INFO_INIT;
  info.tensors = static_cast<uint32_t>(layer.tensors.size());
  if (!layer.own) return info;
  const Layout& layout = pager.layout();
  const uint32_t stored = *layer.own;
  info.flat_count = layout.model.layers[stored].padded;
  info.weight_bytes = info.flat_count * layout.options.weight_bytes();
  info.weights = tier_of(layout.page(layout.weight(stored, 0)).home);
  if (layout.chunk_count(stored) == 0 || !layout.model.layers[stored].trainable()) return info;
  info.gradients = tier_of(layout.page(layout.gradient(stored, 0)).home);
  info.optimizer = tier_of(layout.page(layout.optimizer(stored, 0)).home);
  return info;
}

}  // namespace
}  // namespace overspill

using namespace overspill;

extern "C" {

osp_status_t osp_layer_register(osp_engine_t handle, const char* name, const osp_tensor_t* tensors,
                                size_t count, uint32_t* layer) {
  return on_engine(handle, [&](Engine& engine) {
    require_pointer(name, "name");
    require_pointer(tensors, "tensors");
    std::vector<TensorDescription> descriptions;
    const osp_tensor_t* given = tensors;
    for (size_t i = 0; i < count; ++i) {
      const osp_tensor_t tensor = read_options(given, kTensorDefaults, "tensors[]");
      descriptions.push_back(description_of(tensor, engine));
      given = next_tensor(given);
    }
    const std::lock_guard lock(engine.mutex);
    require_open(engine);
    const uint32_t index = engine.registry.add(name, descriptions);
    if (layer != nullptr) *layer = index;
  });
}

osp_status_t osp_set_order(osp_engine_t handle, const uint32_t* layers, size_t count) {
  return on_engine(handle, [&](Engine& engine) {
    require_pointer(layers, "layers");
    std::vector<uint32_t> order(layers, layers + count);
    if (order.empty()) refuse(Misuse::bad_argument, "an order without layers");
    const std::lock_guard lock(engine.mutex);
    if (engine.pager) return engine.pager->declare_order(std::move(order));
    for (const uint32_t layer : order) {
      if (layer < engine.registry.layers().size()) continue;
      refuse(Misuse::bad_argument, "layer {}: {} are registered", layer,
             engine.registry.layers().size());
    }
    engine.order = std::move(order);
  });
}

osp_status_t osp_finalize(osp_engine_t handle, osp_plan_t* plan) {
  return on_engine(handle, [&](Engine& engine) {
    if (plan != nullptr) require_size(plan->size, sizeof(size_t), "plan");
    const std::lock_guard lock(engine.mutex);
    require_open(engine);
    if (engine.registry.layers().empty()) {
      refuse(Misuse::bad_argument, "no layer is registered");
    }
    require_no_raw_device(engine);
    engine.registry.finish(engine.config.unfrozen_parameters);
    engine.finalized = true;
    Pager::Options options{
        .held_layers = engine.options.held_layers,
        .micro_batch_major = engine.options.loop == OSP_LOOP_MICRO_BATCH_MAJOR,
        .log = engine.callbacks.log(),
        .progress = engine.callbacks.progress(),
        .warn = [&engine](const std::string& message) { engine.callbacks.warn(message); },
        .gpu = engine.gpu};
    auto pager =
        std::make_unique<Pager>(engine.registry, engine.config, *engine.ranks, std::move(options));
    auto activations = std::make_unique<ActivationStore>(
        ActivationStore::Options{.host_bytes = engine.options.activation_host_bytes,
                                 .nvme_bytes = engine.options.activation_nvme_bytes,
                                 .nvme_paths = pager->nvme_paths(),
                                 .io = engine.config.offload.io,
                                 .gpu = pager->gpu()});
    if (engine.order) pager->declare_order(*engine.order);
    give_result(plan_of(pager->layout()), plan, "plan");
    engine.pager = std::move(pager);
    engine.activations = std::move(activations);
  });
}

osp_status_t osp_layer_get_info(osp_engine_t handle, uint32_t layer, osp_layer_info_t* info) {
  return on_pager(handle, [&](Engine&, Pager& pager) {
    require_pointer(info, "info");
    const auto& layers = pager.registry().layers();
    if (layer >= layers.size()) {
      refuse(Misuse::bad_argument, "layer {}: {} are registered", layer, layers.size());
    }
    give_result(layer_info(pager, layers[layer]), info, "info");
  });
}

osp_status_t osp_tensor_get_info(osp_engine_t handle, const char* tensor, osp_tensor_info_t* info) {
  return on_pager(handle, [&](Engine& engine, Pager& pager) {
    require_pointer(tensor, "tensor");
    require_pointer(info, "info");
    const LayerRegistry& registry = pager.registry();
    const auto found = registry.find(tensor);
    if (!found) refuse(Misuse::unknown_tensor, "no layer has a tensor \"{}\"", tensor);
    const TensorPlace& place = registry.layers()[found->first].tensors[found->second];
    const LayerTensor& stored = registry.stored(place);
    osp_tensor_info_t out = OSP_TENSOR_INFO_INIT;
    out.layer = found->first;
    out.index = found->second;
    out.count = place.elements;
    out.offset = stored.offset;
    out.owner_layer =
        static_cast<uint32_t>(&registry.owner(place.stored_layer) - registry.layers().data());
    out.dtype = engine.config.precision == Precision::bf16 ? OSP_BFLOAT16 : OSP_FLOAT32;
    out.frozen = stored.trainable ? 0 : 1;
    give_result(out, info, "info");
  });
}

osp_status_t osp_describe_plan(osp_engine_t handle, char* text, size_t capacity, size_t* needed) {
  return on_pager(handle, [&](Engine&, Pager& pager) {
    give_text(describe(pager.layout()), text, capacity, needed);
  });
}

}  // extern "C"
