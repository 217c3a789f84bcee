// The engine's statuses as Python exceptions: one class, whose `status` says which error it is.
#include "errors.h"

#include <nanobind/stl/string.h>

#include <string>

namespace nb = nanobind;

namespace overspill::python {
namespace {

/// Borrowed from the module, which outlives every call.
PyObject* error_type = nullptr;

void define_status(nb::module_& module) {
  nb::enum_<osp_status_t>(module, "Status", nb::is_arithmetic(), "What a call of the engine gave.")
      .value("SUCCESS", OSP_SUCCESS)
      .value("INVALID_ARGUMENT", OSP_ERROR_INVALID_ARGUMENT)
      .value("INVALID_HANDLE", OSP_ERROR_INVALID_HANDLE)
      .value("INVALID_CONFIG", OSP_ERROR_INVALID_CONFIG)
      .value("NOT_FINALIZED", OSP_ERROR_NOT_FINALIZED)
      .value("ALREADY_FINALIZED", OSP_ERROR_ALREADY_FINALIZED)
      .value("UNKNOWN_TENSOR", OSP_ERROR_UNKNOWN_TENSOR)
      .value("DUPLICATE_NAME", OSP_ERROR_DUPLICATE_NAME)
      .value("SIZE_MISMATCH", OSP_ERROR_SIZE_MISMATCH)
      .value("DTYPE_MISMATCH", OSP_ERROR_DTYPE_MISMATCH)
      .value("ALREADY_ACQUIRED", OSP_ERROR_ALREADY_ACQUIRED)
      .value("NOT_ACQUIRED", OSP_ERROR_NOT_ACQUIRED)
      .value("NO_SLOT", OSP_ERROR_NO_SLOT)
      .value("LAYERS_HELD", OSP_ERROR_LAYERS_HELD)
      .value("FROZEN", OSP_ERROR_FROZEN)
      .value("GRADIENT_COMPLETE", OSP_ERROR_GRADIENT_COMPLETE)
      .value("GRADIENT_MISSING", OSP_ERROR_GRADIENT_MISSING)
      .value("STEP_NOT_STARTED", OSP_ERROR_STEP_NOT_STARTED)
      .value("NO_WEIGHTS", OSP_ERROR_NO_WEIGHTS)
      .value("INVALID_FILE", OSP_ERROR_INVALID_FILE)
      .value("NOT_FOUND", OSP_ERROR_NOT_FOUND)
      .value("DOES_NOT_FIT", OSP_ERROR_DOES_NOT_FIT)
      .value("UNSUPPORTED", OSP_ERROR_UNSUPPORTED)
      .value("CANCELLED", OSP_ERROR_CANCELLED)
      .value("IO", OSP_ERROR_IO)
      .value("NON_FINITE", OSP_ERROR_NON_FINITE)
      .value("RANK_LOST", OSP_ERROR_RANK_LOST)
      .value("INTERNAL", OSP_ERROR_INTERNAL);
}

}  // namespace

void define_errors(nb::module_& module) {
  define_status(module);
  error_type = PyErr_NewExceptionWithDoc(
      "overspill.Error",
      "An error of the engine; `status` says which, the text what to do about it.",
      PyExc_RuntimeError, nullptr);
  if (error_type == nullptr) throw nb::python_error();
  module.attr("Error") = nb::borrow(error_type);
}

void check(osp_status_t status) {
  if (status == OSP_SUCCESS) return;
  const std::string message = osp_last_error();
  nb::object error = nb::borrow(error_type)(message.empty() ? osp_status_string(status) : message);
  error.attr("status") = status;
  PyErr_SetObject(error_type, error.ptr());
  throw nb::python_error();
}

}  // namespace overspill::python
