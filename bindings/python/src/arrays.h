// Arrays of other frameworks (NumPy, PyTorch, anything with DLPack) as the engine's pointers and
// types.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <vector>

#include "overspill.h"

namespace overspill::python {

/// Any contiguous array, on the host or a GPU; only read.
using Array = nanobind::ndarray<nanobind::ro, nanobind::c_contig>;
/// One that is written to.
using WritableArray = nanobind::ndarray<nanobind::c_contig>;

/// The engine's name of an element type. Throws TypeError for one the engine does not know.
osp_dtype_t dtype_of(nanobind::dlpack::dtype type);

/// Throws TypeError unless the array is in host memory, where `use` wants it.
template <typename AnyArray>
void require_host(const AnyArray& array, const char* use) {
  if (array.device_type() == nanobind::device::cpu::value) return;
  throw nanobind::type_error(use);
}

/// Memory of `elements` as an array that keeps `owner` alive. DLPack knows bf16; NumPy does not,
/// and gets bits as uint16 when `numpy` is set.
nanobind::object view_memory(uintptr_t address, const std::vector<uint64_t>& shape,
                             osp_dtype_t dtype, nanobind::handle owner, bool numpy, bool writable,
                             int cuda_device);

}  // namespace overspill::python
