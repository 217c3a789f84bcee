// What the engine reports, as Python classes.
#pragma once

#include <nanobind/nanobind.h>

namespace overspill::python {

/// Defines enumerations, plans, descriptions, results and statistics.
void define_structures(nanobind::module_& module);

}  // namespace overspill::python
