// One engine of the C API, as Python holds it.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "arrays.h"
#include "overspill.h"

namespace overspill::python {

struct EngineArguments {
  uint32_t rank = 0, world_size = 1;
  std::optional<std::string> master_address, device;
  uint32_t held_layers = 1;
  osp_loop_t loop = OSP_LOOP_MICRO_BATCH_MAJOR;
  uint64_t activation_host_bytes = 0, activation_nvme_bytes = 0;
  osp_log_level_t log_level = OSP_LOG_WARNING;
};

/// A tensor to register; the optional fields of osp_tensor_t.
struct TensorSpec {
  std::string name;
  std::vector<uint64_t> shape;
  osp_dtype_t dtype = OSP_DTYPE_DEFAULT;
  std::optional<bool> decay;
  uint32_t group = 0;
  bool frozen = false;
  std::optional<std::string> tied_to;
};

struct StepArguments {
  double learning_rate = 0;
  std::vector<double> learning_rates;
  double loss_scale = 1;
  bool allow_missing = false;
};

/// Owns the handle and the callbacks. Threads: as the header says; the interpreter's lock is not
/// held while the engine works.
class Engine {
 public:
  Engine(const std::string& configuration, const EngineArguments& arguments, nanobind::object log,
         nanobind::object progress);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  void close();
  /// For the garbage collector: what the callbacks refer to may refer to the engine.
  int visit(visitproc visit, void* arg) const;
  void clear() noexcept;
  bool closed() const { return handle_ == nullptr; }
  osp_engine_t handle() const { return handle_; }
  /// Throws TypeError for an array of a GPU where the engine computes on the host.
  template <typename AnyArray>
  void require_reachable(const AnyArray& array) const {
    if (on_host_) require_host(array, "the engine computes on the host, and the array is a GPU's");
  }

  uint32_t register_layer(const std::string& name, const std::vector<TensorSpec>& tensors);
  void set_order(const std::vector<uint32_t>& layers);
  osp_plan_t finalize();
  osp_layer_info_t layer_info(uint32_t layer) const;
  osp_tensor_info_t tensor_info(const std::string& tensor) const;
  std::string describe_plan() const;

  void write_tensor(const std::string& tensor, const Array& values);
  void read_tensor(const std::string& tensor, const WritableArray& out) const;

  std::vector<uintptr_t> acquire(uint32_t layer, uintptr_t stream);
  void release(uint32_t layer, uintptr_t stream);
  void submit_gradient(uint32_t layer, uint32_t tensor, const Array& gradient, uintptr_t stream);
  void submit_gradients(uint32_t layer, const Array& gradients, uintptr_t stream);

  void step_begin(const StepArguments& arguments);
  void step(const std::optional<StepArguments>& arguments);
  std::optional<osp_step_result_t> step_poll() const;
  osp_step_result_t step_wait() const;

  void save_checkpoint(const std::string& directory, const std::optional<std::string>& config_json,
                       const std::optional<std::string>& user_state, uint32_t total_limit,
                       bool only_model);
  std::string user_state() const;
  osp_statistics_t statistics() const;

 private:
  static void on_log(void* self, osp_log_level_t level, const char* message);
  static int on_progress(void* self, const char* what, double fraction);

  void forget_callbacks();

  osp_engine_t handle_ = nullptr;
  bool on_host_ = false;  ///< as the caller said; otherwise the engine knows
  nanobind::object log_, progress_;
  std::vector<uint32_t> tensor_counts_;  ///< of each layer
};

/// Defines `Engine` and what belongs to it.
void define_engine(nanobind::module_& module);

}  // namespace overspill::python
