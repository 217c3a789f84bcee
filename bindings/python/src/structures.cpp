// What the engine reports, as Python classes with read-only fields.
#include "structures.h"

#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>

#include <array>
#include <cstdint>

#include "overspill.h"

namespace nb = nanobind;

namespace overspill::python {
namespace {

/// A C array of a structure as a tuple-like list in Python.
template <typename Struct, typename Value, size_t Count>
auto elements(Value (Struct::*field)[Count]) {
  return [field](const Struct& structure) {
    std::array<Value, Count> values{};
    for (size_t i = 0; i < Count; ++i) values[i] = (structure.*field)[i];
    return values;
  };
}

void define_enums(nb::module_& module) {
  nb::enum_<osp_dtype_t>(module, "DType", "Element types; DEFAULT is the precision's.")
      .value("DEFAULT", OSP_DTYPE_DEFAULT)
      .value("FLOAT32", OSP_FLOAT32)
      .value("BFLOAT16", OSP_BFLOAT16)
      .value("FLOAT16", OSP_FLOAT16);
  nb::enum_<osp_loop_t>(module, "Loop", "Order of a step with several micro-batches.")
      .value("MICRO_BATCH_MAJOR", OSP_LOOP_MICRO_BATCH_MAJOR)
      .value("LAYER_MAJOR", OSP_LOOP_LAYER_MAJOR);
  nb::enum_<osp_tier_t>(module, "Tier", "Where state lives.")
      .value("DEVICE", OSP_TIER_DEVICE)
      .value("HOST", OSP_TIER_HOST)
      .value("NVME", OSP_TIER_NVME);
  nb::enum_<osp_log_level_t>(module, "LogLevel", nb::is_arithmetic(), "Least level of log lines.")
      .value("DEBUG", OSP_LOG_DEBUG)
      .value("INFO", OSP_LOG_INFO)
      .value("WARNING", OSP_LOG_WARNING);
}

void define_plan(nb::module_& module) {
  nb::class_<osp_plan_t>(module, "Plan",
                         "Where everything lives, in bytes of this rank. Lists of three are the "
                         "device, host memory and NVMe.")
      .def_ro("layers", &osp_plan_t::layers)
      .def_ro("parameters", &osp_plan_t::parameters)
      .def_ro("trainable_parameters", &osp_plan_t::trainable_parameters)
      .def_ro("device_bytes", &osp_plan_t::device_bytes)
      .def_ro("host_bytes", &osp_plan_t::host_bytes)
      .def_ro("nvme_bytes", &osp_plan_t::nvme_bytes)
      .def_prop_ro("weight_bytes", elements(&osp_plan_t::weight_bytes))
      .def_prop_ro("gradient_bytes", elements(&osp_plan_t::gradient_bytes))
      .def_prop_ro("optimizer_bytes", elements(&osp_plan_t::optimizer_bytes))
      .def_ro("prefetch_depth", &osp_plan_t::prefetch_depth)
      .def_ro("weight_slots", &osp_plan_t::weight_slots);
}

void define_tensor_info(nb::module_& module) {
  nb::class_<osp_layer_info_t>(module, "LayerInfo", "A layer's size and homes.")
      .def_ro("tensors", &osp_layer_info_t::tensors)
      .def_ro("flat_count", &osp_layer_info_t::flat_count)
      .def_ro("weight_bytes", &osp_layer_info_t::weight_bytes)
      .def_ro("weights", &osp_layer_info_t::weights)
      .def_ro("gradients", &osp_layer_info_t::gradients)
      .def_ro("optimizer", &osp_layer_info_t::optimizer);
  nb::class_<osp_tensor_info_t>(module, "TensorInfo", "A tensor's place and type.")
      .def_ro("layer", &osp_tensor_info_t::layer)
      .def_ro("index", &osp_tensor_info_t::index)
      .def_ro("count", &osp_tensor_info_t::count)
      .def_ro("offset", &osp_tensor_info_t::offset)
      .def_ro("owner_layer", &osp_tensor_info_t::owner_layer)
      .def_ro("dtype", &osp_tensor_info_t::dtype)
      .def_prop_ro("frozen", [](const osp_tensor_info_t& info) { return info.frozen != 0; });
}

void define_results(nb::module_& module) {
  nb::class_<osp_step_result_t>(module, "StepResult", "What became of a step.")
      .def_ro("step", &osp_step_result_t::step)
      .def_ro("updates", &osp_step_result_t::updates)
      .def_ro("gradient_norm", &osp_step_result_t::gradient_norm)
      .def_ro("clip_factor", &osp_step_result_t::clip_factor)
      .def_prop_ro("skipped", [](const osp_step_result_t& result) { return result.skipped != 0; });
  nb::class_<osp_statistics_t>(module, "Statistics",
                               "Since finalize. Lists have an entry for each of LANES.")
      .def_ro("steps", &osp_statistics_t::steps)
      .def_ro("updates", &osp_statistics_t::updates)
      .def_ro("skipped", &osp_statistics_t::skipped)
      .def_prop_ro("lane_bytes", elements(&osp_statistics_t::lane_bytes))
      .def_prop_ro("lane_ops", elements(&osp_statistics_t::lane_ops))
      .def_prop_ro("lane_seconds", elements(&osp_statistics_t::lane_seconds))
      .def_ro("acquires", &osp_statistics_t::acquires)
      .def_ro("acquires_waited", &osp_statistics_t::acquires_waited)
      .def_ro("acquire_wait_seconds", &osp_statistics_t::acquire_wait_seconds)
      .def_ro("deviations", &osp_statistics_t::deviations)
      .def_ro("deviation_bytes", &osp_statistics_t::deviation_bytes)
      .def_ro("activation_bytes_saved", &osp_statistics_t::activation_bytes_saved)
      .def_ro("activation_bytes_spilled", &osp_statistics_t::activation_bytes_spilled);
  module.attr("LANES") =
      nb::make_tuple("nvme_read", "nvme_write", "h2d", "d2h", "compute", "collective", "optimizer");
}

}  // namespace

void define_structures(nb::module_& module) {
  define_enums(module);
  define_plan(module);
  define_tensor_info(module);
  define_results(module);
}

}  // namespace overspill::python
