// One engine of the C API: arguments of Python turned into the header's structures, and callbacks.
#include "engine.h"

#include "errors.h"

namespace nb = nanobind;

namespace overspill::python {
namespace {

constexpr const char* kHostTensors =
    "whole tensors are written from and read to host memory; use an array of the CPU";

const char* text_or_null(const std::optional<std::string>& text) {
  return text ? text->c_str() : nullptr;
}

void* stream_pointer(uintptr_t stream) {
  return reinterpret_cast<void*>(stream);  // NOLINT: streams are integers in Python
}

/// A text of the engine, by the two calls that the header asks for.
template <typename Call>
std::string read_text(Call&& read) {
  size_t needed = 0;
  call([&] { return read(nullptr, 0, &needed); });
  std::string text(needed, '\0');
  call([&] { return read(text.data(), text.size(), &needed); });
  text.resize(text.empty() ? 0 : text.size() - 1);  // the final zero
  return text;
}

osp_step_options_t step_options(const StepArguments& arguments) {
  osp_step_options_t options = OSP_STEP_OPTIONS_INIT;
  options.learning_rate = arguments.learning_rate;
  options.learning_rates =
      arguments.learning_rates.empty() ? nullptr : arguments.learning_rates.data();
  options.groups = arguments.learning_rates.size();
  options.loss_scale = arguments.loss_scale;
  options.allow_missing = arguments.allow_missing;
  return options;
}

}  // namespace

Engine::Engine(const std::string& configuration, const EngineArguments& arguments, nb::object log,
               nb::object progress)
    : on_host_(arguments.device == "host"), log_(std::move(log)), progress_(std::move(progress)) {
  osp_engine_options_t options = OSP_ENGINE_OPTIONS_INIT;
  options.rank = arguments.rank;
  options.world_size = arguments.world_size;
  options.master_address = text_or_null(arguments.master_address);
  options.device = text_or_null(arguments.device);
  options.held_layers = arguments.held_layers;
  options.loop = arguments.loop;
  options.activation_host_bytes = arguments.activation_host_bytes;
  options.activation_nvme_bytes = arguments.activation_nvme_bytes;
  options.log = log_.is_none() ? nullptr : &Engine::on_log;
  options.log_level = arguments.log_level;
  options.progress = progress_.is_none() ? nullptr : &Engine::on_progress;
  options.user = this;
  call([&] { return osp_engine_create(configuration.c_str(), &options, &handle_); });
}

Engine::~Engine() { clear(); }

void Engine::close() {
  if (handle_ == nullptr) return;
  osp_engine_t handle = std::exchange(handle_, nullptr);
  try {
    call([&] { return osp_engine_destroy(handle); });
  } catch (...) {
    forget_callbacks();
    throw;
  }
  forget_callbacks();
}

int Engine::visit(visitproc visit, void* arg) const {
  Py_VISIT(log_.ptr());
  Py_VISIT(progress_.ptr());
  return 0;
}

void Engine::clear() noexcept {
  if (handle_ == nullptr) return;
  osp_engine_t handle = std::exchange(handle_, nullptr);
  {
    nb::gil_scoped_release unlocked;
    osp_engine_destroy(handle);  // what it has met was the last call's to say
  }
  forget_callbacks();
}

// Once the engine is destroyed: its threads call them until then.
void Engine::forget_callbacks() {
  log_.reset();
  progress_.reset();
}

void Engine::on_log(void* self, osp_log_level_t level, const char* message) {
  nb::gil_scoped_acquire locked;
  try {
    static_cast<Engine*>(self)->log_(static_cast<int>(level), message);
  } catch (nb::python_error& error) {
    error.discard_as_unraisable("overspill's log callback");
  }
}

int Engine::on_progress(void* self, const char* what, double fraction) {
  nb::gil_scoped_acquire locked;
  try {
    const nb::object stop = static_cast<Engine*>(self)->progress_(what, fraction);
    return PyObject_IsTrue(stop.ptr()) == 1;
  } catch (nb::python_error& error) {
    // An exception, Ctrl-C too, ends what is under way.
    error.discard_as_unraisable("overspill's progress callback");
    return 1;
  }
}

uint32_t Engine::register_layer(const std::string& name, const std::vector<TensorSpec>& tensors) {
  std::vector<osp_tensor_t> raw;
  for (const TensorSpec& spec : tensors) {
    osp_tensor_t tensor = OSP_TENSOR_INIT;
    tensor.name = spec.name.c_str();
    tensor.shape = spec.shape.data();
    tensor.rank = static_cast<uint32_t>(spec.shape.size());
    tensor.dtype = spec.dtype;
    tensor.decay = spec.decay ? int32_t{*spec.decay} : -1;
    tensor.group = spec.group;
    tensor.frozen = spec.frozen;
    tensor.tied_to = text_or_null(spec.tied_to);
    raw.push_back(tensor);
  }
  uint32_t layer = 0;
  call([&] { return osp_layer_register(handle_, name.c_str(), raw.data(), raw.size(), &layer); });
  tensor_counts_.push_back(static_cast<uint32_t>(raw.size()));
  return layer;
}

void Engine::set_order(const std::vector<uint32_t>& layers) {
  call([&] { return osp_set_order(handle_, layers.data(), layers.size()); });
}

osp_plan_t Engine::finalize() {
  osp_plan_t plan = OSP_PLAN_INIT;
  call([&] { return osp_finalize(handle_, &plan); });
  return plan;
}

osp_layer_info_t Engine::layer_info(uint32_t layer) const {
  osp_layer_info_t info = OSP_LAYER_INFO_INIT;
  call([&] { return osp_layer_get_info(handle_, layer, &info); });
  return info;
}

osp_tensor_info_t Engine::tensor_info(const std::string& tensor) const {
  osp_tensor_info_t info = OSP_TENSOR_INFO_INIT;
  call([&] { return osp_tensor_get_info(handle_, tensor.c_str(), &info); });
  return info;
}

std::string Engine::describe_plan() const {
  return read_text([&](char* text, size_t capacity, size_t* needed) {
    return osp_describe_plan(handle_, text, capacity, needed);
  });
}

void Engine::write_tensor(const std::string& tensor, const Array& values) {
  require_host(values, kHostTensors);
  const osp_dtype_t dtype = dtype_of(values.dtype());
  call([&] {
    return osp_tensor_write(handle_, tensor.c_str(), values.data(), dtype, values.size());
  });
}

void Engine::read_tensor(const std::string& tensor, const WritableArray& out) const {
  require_host(out, kHostTensors);
  const osp_dtype_t dtype = dtype_of(out.dtype());
  call([&] { return osp_tensor_read(handle_, tensor.c_str(), out.data(), dtype, out.size()); });
}

std::vector<uintptr_t> Engine::acquire(uint32_t layer, uintptr_t stream) {
  const size_t count = layer < tensor_counts_.size() ? tensor_counts_[layer] : 0;
  std::vector<const void*> weights(count);
  call([&] {
    return osp_acquire(handle_, layer, stream_pointer(stream), weights.data(), weights.size());
  });
  std::vector<uintptr_t> addresses;
  for (const void* weight : weights) addresses.push_back(reinterpret_cast<uintptr_t>(weight));
  return addresses;
}

void Engine::release(uint32_t layer, uintptr_t stream) {
  call([&] { return osp_release(handle_, layer, stream_pointer(stream)); });
}

void Engine::submit_gradient(uint32_t layer, uint32_t tensor, const Array& gradient,
                             uintptr_t stream) {
  require_reachable(gradient);
  const osp_dtype_t dtype = dtype_of(gradient.dtype());
  call([&] {
    return osp_submit_gradient(handle_, layer, tensor, gradient.data(), dtype, gradient.size(),
                               stream_pointer(stream));
  });
}

void Engine::submit_gradients(uint32_t layer, const Array& gradients, uintptr_t stream) {
  require_reachable(gradients);
  const osp_dtype_t dtype = dtype_of(gradients.dtype());
  call([&] {
    return osp_submit_gradients(handle_, layer, gradients.data(), dtype, gradients.size(),
                                stream_pointer(stream));
  });
}

void Engine::step_begin(const StepArguments& arguments) {
  const osp_step_options_t options = step_options(arguments);
  call([&] { return osp_step_begin(handle_, &options); });
}

void Engine::step(const std::optional<StepArguments>& arguments) {
  if (!arguments) return call([&] { return osp_step(handle_, nullptr); });
  const osp_step_options_t options = step_options(*arguments);
  call([&] { return osp_step(handle_, &options); });
}

std::optional<osp_step_result_t> Engine::step_poll() const {
  osp_step_result_t result = OSP_STEP_RESULT_INIT;
  int32_t done = 0;
  call([&] { return osp_step_poll(handle_, &done, &result); });
  return done != 0 ? std::optional(result) : std::nullopt;
}

osp_step_result_t Engine::step_wait() const {
  osp_step_result_t result = OSP_STEP_RESULT_INIT;
  call([&] { return osp_step_wait(handle_, &result); });
  return result;
}

void Engine::save_checkpoint(const std::string& directory,
                             const std::optional<std::string>& config_json,
                             const std::optional<std::string>& user_state, uint32_t total_limit,
                             bool only_model) {
  osp_checkpoint_options_t options = OSP_CHECKPOINT_OPTIONS_INIT;
  options.config_json = text_or_null(config_json);
  options.user_state = text_or_null(user_state);
  options.total_limit = total_limit;
  options.only_model = only_model;
  call([&] { return osp_checkpoint_save(handle_, directory.c_str(), &options); });
}

std::string Engine::user_state() const {
  return read_text([&](char* text, size_t capacity, size_t* needed) {
    return osp_checkpoint_user_state(handle_, text, capacity, needed);
  });
}

osp_statistics_t Engine::statistics() const {
  osp_statistics_t statistics = OSP_STATISTICS_INIT;
  call([&] { return osp_get_statistics(handle_, &statistics); });
  return statistics;
}

}  // namespace overspill::python
