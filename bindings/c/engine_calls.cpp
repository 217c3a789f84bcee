// Creating and destroying engines, and what they give beside layers: memory, statistics, traces.
#include "bindings/c/engine.h"

namespace overspill {
namespace {

const osp_engine_options_t kEngineDefaults = OSP_ENGINE_OPTIONS_INIT;

osp_statistics_t statistics_of(Engine& engine, Pager& pager) {
  osp_statistics_t out = OSP_STATISTICS_INIT;
  const PagerStatistics work = pager.statistics();
  out.steps = work.steps;
  out.updates = work.updates;
  out.skipped = work.skipped;
  for (size_t lane = 0; lane < OSP_LANES; ++lane) {
    out.lane_bytes[lane] = work.lane_bytes[lane];
    out.lane_ops[lane] = work.lane_ops[lane];
    out.lane_seconds[lane] = work.lane_seconds[lane];
  }
  const AccessCounts access = pager.access_counts();
  out.acquires = access.acquires;
  out.acquires_waited = access.waited;
  out.acquire_wait_seconds = access.wait_seconds;
  out.deviations = access.deviations;
  out.deviation_bytes = access.deviation_bytes;
  const ActivationStore::Counts activations = engine.activations->counts();
  out.activation_bytes_saved = activations.saved_bytes;
  out.activation_bytes_spilled = activations.spilled_bytes;
  return out;
}

}  // namespace
}  // namespace overspill

using namespace overspill;

extern "C" {

osp_status_t osp_engine_create(const char* configuration, const osp_engine_options_t* options,
                               osp_engine_t* engine) {
  return guarded([&] {
    require_pointer(engine, "engine");
    *engine = nullptr;
    const osp_engine_options_t given = read_options(options, kEngineDefaults, "options");
    *engine = add_engine(std::make_shared<Engine>(configuration, given));
  });
}

osp_status_t osp_engine_destroy(osp_engine_t handle) {
  if (handle == nullptr) return OSP_SUCCESS;
  return guarded([&] {
    std::shared_ptr<Engine> engine = remove_engine(handle);
    const GpuScope gpu(engine->gpu.has_value());
    std::exception_ptr error;
    {
      const LogScope log(engine->callbacks.log());
      try {
        if (engine->pager) engine->pager->drain();
      } catch (...) {
        error = std::current_exception();
      }
    }
    engine.reset();
    if (error) std::rethrow_exception(error);
  });
}

osp_status_t osp_memory_allocate(osp_engine_t handle, uint64_t bytes, int32_t node, void** memory) {
  return on_engine(handle, [&](Engine& engine) {
    require_pointer(memory, "memory");
    if (node < -1) refuse(Misuse::bad_argument, "node {}: a NUMA node from 0 on, or -1", node);
    *memory = engine.blocks->allocate(
        bytes, node < 0 ? std::nullopt : std::optional(static_cast<uint32_t>(node)));
  });
}

osp_status_t osp_memory_free(osp_engine_t handle, void* memory) {
  return on_engine(handle, [&](Engine& engine) {
    if (memory != nullptr) engine.blocks->free(static_cast<std::byte*>(memory));
  });
}

osp_status_t osp_get_statistics(osp_engine_t handle, osp_statistics_t* statistics) {
  return on_pager(handle, [&](Engine& engine, Pager& pager) {
    require_pointer(statistics, "statistics");
    give_result(statistics_of(engine, pager), statistics, "statistics");
  });
}

osp_status_t osp_trace_start(osp_engine_t handle) {
  return on_pager(handle, [&](Engine&, Pager& pager) { pager.start_trace(); });
}

osp_status_t osp_trace_write(osp_engine_t handle, const char* path) {
  return on_pager(handle, [&](Engine&, Pager& pager) {
    require_pointer(path, "path");
    pager.write_trace(path);
  });
}

osp_status_t osp_activation_save(osp_engine_t handle, const void* buffer, uint64_t bytes,
                                 void* stream, osp_activation_t* activation) {
  return on_pager(handle, [&](Engine& engine, Pager&) {
    require_pointer(buffer, "buffer");
    require_pointer(activation, "activation");
    require_stream_of(engine, stream);
    *activation = engine.activations->save(static_cast<const std::byte*>(buffer), bytes, stream);
  });
}

osp_status_t osp_activation_prefetch(osp_engine_t handle, osp_activation_t activation) {
  return on_pager(handle,
                  [&](Engine& engine, Pager&) { engine.activations->prefetch(activation); });
}

osp_status_t osp_activation_restore(osp_engine_t handle, osp_activation_t activation, void* buffer,
                                    uint64_t bytes, void* stream) {
  return on_pager(handle, [&](Engine& engine, Pager&) {
    require_pointer(buffer, "buffer");
    require_stream_of(engine, stream);
    engine.activations->restore(activation, static_cast<std::byte*>(buffer), bytes, stream);
  });
}

osp_status_t osp_activation_discard(osp_engine_t handle, osp_activation_t activation) {
  return on_pager(handle, [&](Engine& engine, Pager&) { engine.activations->discard(activation); });
}

}  // extern "C"
