// What a training step calls: weights, gradients, the step itself.
#include "bindings/c/engine.h"

namespace overspill {
namespace {

const osp_step_options_t kStepDefaults = OSP_STEP_OPTIONS_INIT;

StepRates rates_of(const osp_step_options_t& options, const Pager& pager) {
  StepRates rates;
  rates.loss_scale = options.loss_scale;
  if (options.learning_rates == nullptr) {
    rates.learning_rates.assign(pager.registry().groups(), options.learning_rate);
    return rates;
  }
  constexpr size_t kMostGroups = 1 << 16;
  if (options.groups > kMostGroups) {
    refuse(Misuse::bad_argument, "{} groups of learning rates: at most {}", options.groups,
           kMostGroups);
  }
  rates.learning_rates.assign(options.learning_rates, options.learning_rates + options.groups);
  return rates;
}

osp_step_result_t result_of(const StepReport& report) {
  osp_step_result_t result = OSP_STEP_RESULT_INIT;
  result.step = report.step;
  result.updates = report.updates;
  result.gradient_norm = report.gradient_norm;
  result.clip_factor = report.clip_factor;
  result.skipped = report.skipped ? 1 : 0;
  return result;
}

TensorValues values_of(const void* values, osp_dtype_t type, uint64_t count, const Engine& engine) {
  const DType checked = dtype_of(type, engine);
  require_pointer(values, "gradient");
  return {values, checked, count};
}

}  // namespace
}  // namespace overspill

using namespace overspill;

extern "C" {

osp_status_t osp_acquire(osp_engine_t handle, uint32_t layer, void* stream, const void** weights,
                         size_t count) {
  return on_pager(handle, [&](Engine& engine, Pager& pager) {
    if (count > 0) require_pointer(weights, "weights");
    require_stream_of(engine, stream);
    pager.acquire(layer, std::span(weights, count), stream);
  });
}

osp_status_t osp_prefetch(osp_engine_t handle, uint32_t layer) {
  return on_pager(handle, [&](Engine&, Pager& pager) { pager.prefetch(layer); });
}

osp_status_t osp_release(osp_engine_t handle, uint32_t layer, void* stream) {
  return on_pager(handle, [&](Engine& engine, Pager& pager) {
    require_stream_of(engine, stream);
    pager.release(layer, stream);
  });
}

osp_status_t osp_submit_gradient(osp_engine_t handle, uint32_t layer, uint32_t tensor,
                                 const void* gradient, osp_dtype_t dtype, uint64_t count,
                                 void* stream) {
  return on_pager(handle, [&](Engine& engine, Pager& pager) {
    require_stream_of(engine, stream);
    pager.submit(layer, tensor, values_of(gradient, dtype, count, engine), stream);
  });
}

osp_status_t osp_submit_gradients(osp_engine_t handle, uint32_t layer, const void* gradients,
                                  osp_dtype_t dtype, uint64_t count, void* stream) {
  return on_pager(handle, [&](Engine& engine, Pager& pager) {
    require_stream_of(engine, stream);
    pager.submit_flat(layer, values_of(gradients, dtype, count, engine), stream);
  });
}

osp_status_t osp_gradients_done(osp_engine_t handle, uint32_t layer) {
  return on_pager(handle, [&](Engine&, Pager& pager) { pager.gradients_done(layer); });
}

osp_status_t osp_step_begin(osp_engine_t handle, const osp_step_options_t* options) {
  return on_pager(handle, [&](Engine&, Pager& pager) {
    require_pointer(options, "options");
    pager.begin_step(rates_of(read_options(options, kStepDefaults, "options"), pager));
  });
}

osp_status_t osp_step(osp_engine_t handle, const osp_step_options_t* options) {
  return on_pager(handle, [&](Engine&, Pager& pager) {
    const bool in_backward = pager.layout().options.update == UpdateTiming::in_backward;
    if (!in_backward) require_pointer(options, "options");
    const osp_step_options_t given = read_options(options, kStepDefaults, "options");
    pager.step(rates_of(given, pager), given.allow_missing != 0);
  });
}

osp_status_t osp_step_poll(osp_engine_t handle, int32_t* done, osp_step_result_t* result) {
  return on_pager(handle, [&](Engine&, Pager& pager) {
    require_pointer(done, "done");
    if (result != nullptr) require_size(result->size, sizeof(size_t), "result");
    const std::optional<StepReport> report = pager.poll_step();
    *done = report ? 1 : 0;
    if (report) give_result(result_of(*report), result, "result");
  });
}

osp_status_t osp_step_wait(osp_engine_t handle, osp_step_result_t* result) {
  return on_pager(handle, [&](Engine&, Pager& pager) {
    if (result != nullptr) require_size(result->size, sizeof(size_t), "result");
    give_result(result_of(pager.wait_step()), result, "result");
  });
}

osp_status_t osp_flush(osp_engine_t handle) {
  return on_pager(handle, [&](Engine&, Pager& pager) { pager.flush(); });
}

}  // extern "C"
