// The extension module `overspill._core`: the C API's header, for Python.
#include <nanobind/nanobind.h>

#include "engine.h"
#include "errors.h"
#include "structures.h"

NB_MODULE(_core, module) {
  // What is alive when the interpreter ends is closed by atexit, and is no leak.
  nanobind::set_leak_warnings(false);
  module.doc() = "The engine's C API; see overspill and overspill.torch for what is built on it.";
  overspill::python::define_errors(module);
  overspill::python::define_structures(module);
  overspill::python::define_engine(module);
  module.attr("__version__") =
      nanobind::str("{}.{}.{}").format(OSP_VERSION_MAJOR, OSP_VERSION_MINOR, OSP_VERSION_PATCH);
}
