// Weights in and out, and checkpoints.
#include "bindings/c/engine.h"

namespace overspill {
namespace {

const osp_checkpoint_options_t kCheckpointDefaults = OSP_CHECKPOINT_OPTIONS_INIT;

std::string text_or_empty(const char* text) { return text == nullptr ? "" : text; }

}  // namespace
}  // namespace overspill

using namespace overspill;

extern "C" {

osp_status_t osp_load_weights(osp_engine_t handle, const char* path) {
  return on_pager(handle, [&](Engine&, Pager& pager) {
    require_pointer(path, "path");
    pager.load_weights(path);
  });
}

osp_status_t osp_initialize_weights(osp_engine_t handle, uint64_t seed, double deviation) {
  return on_pager(handle,
                  [&](Engine&, Pager& pager) { pager.initialize_weights(seed, deviation); });
}

osp_status_t osp_tensor_write(osp_engine_t handle, const char* tensor, const void* values,
                              osp_dtype_t dtype, uint64_t count) {
  return on_pager(handle, [&](Engine& engine, Pager& pager) {
    require_pointer(tensor, "tensor");
    require_pointer(values, "values");
    pager.write_tensor(tensor, {values, dtype_of(dtype, engine), count});
  });
}

osp_status_t osp_tensor_read(osp_engine_t handle, const char* tensor, void* values,
                             osp_dtype_t dtype, uint64_t count) {
  return on_pager(handle, [&](Engine& engine, Pager& pager) {
    require_pointer(tensor, "tensor");
    require_pointer(values, "values");
    const DType type = dtype_of(dtype, engine);
    if (type == DType::f16) {
      refuse(Misuse::dtype_mismatch,
             "{}: weights are read as OSP_FLOAT32 or, as compute has them, OSP_BFLOAT16", tensor);
    }
    pager.read_tensor(tensor, values, type, count);
  });
}

osp_status_t osp_export_weights(osp_engine_t handle, const char* directory,
                                const char* config_json) {
  return on_pager(handle, [&](Engine&, Pager& pager) {
    require_pointer(directory, "directory");
    pager.export_weights(directory, text_or_empty(config_json));
  });
}

osp_status_t osp_checkpoint_save(osp_engine_t handle, const char* directory,
                                 const osp_checkpoint_options_t* options) {
  return on_pager(handle, [&](Engine&, Pager& pager) {
    require_pointer(directory, "directory");
    const osp_checkpoint_options_t given = read_options(options, kCheckpointDefaults, "options");
    pager.save_checkpoint({.output_dir = directory,
                           .source_model = {},
                           .total_limit = given.total_limit,
                           .only_model = given.only_model != 0,
                           .user_state = text_or_empty(given.user_state)},
                          text_or_empty(given.config_json));
  });
}

osp_status_t osp_checkpoint_poll(osp_engine_t handle, int32_t* done) {
  return on_pager(handle, [&](Engine&, Pager& pager) {
    require_pointer(done, "done");
    *done = 0;
    *done = pager.poll_checkpoint() ? 1 : 0;
  });
}

osp_status_t osp_checkpoint_wait(osp_engine_t handle) {
  return on_pager(handle, [&](Engine&, Pager& pager) { pager.wait_checkpoint(); });
}

osp_status_t osp_checkpoint_load(osp_engine_t handle, const char* directory) {
  return on_pager(handle, [&](Engine&, Pager& pager) {
    require_pointer(directory, "directory");
    pager.load_checkpoint(directory);
  });
}

osp_status_t osp_checkpoint_user_state(osp_engine_t handle, char* text, size_t capacity,
                                       size_t* needed) {
  return on_pager(handle, [&](Engine&, Pager& pager) {
    give_text(pager.user_state(), text, capacity, needed);
  });
}

}  // extern "C"
