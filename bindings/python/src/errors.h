// The engine's statuses as Python exceptions.
#pragma once

#include <nanobind/nanobind.h>

#include "overspill.h"

namespace overspill::python {

/// Defines `Status` and the exception `Error` in the module.
void define_errors(nanobind::module_& module);

/// Throws `Error` with the status and the engine's message unless `status` is success. Call it with
/// the interpreter's lock held, in the thread whose call gave the status.
void check(osp_status_t status);

/// Calls the engine without the interpreter's lock, because calls wait and the engine's threads
/// call back into Python, and then checks.
template <typename Call>
void call(Call&& engine_call) {
  osp_status_t status = OSP_SUCCESS;
  {
    nanobind::gil_scoped_release unlocked;
    status = engine_call();
  }
  check(status);
}

}  // namespace overspill::python
