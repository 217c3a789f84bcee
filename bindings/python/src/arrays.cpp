// Arrays of other frameworks as the engine's pointers and types, by DLPack's descriptions.
#include "arrays.h"

#include <string>

namespace nb = nanobind;

namespace overspill::python {
namespace {

nb::dlpack::dtype half(nb::dlpack::dtype_code code) {
  return {.code = static_cast<uint8_t>(code), .bits = 16, .lanes = 1};
}

nb::dlpack::dtype dlpack_dtype(osp_dtype_t dtype, bool numpy) {
  switch (dtype) {
    case OSP_BFLOAT16: return numpy ? nb::dtype<uint16_t>() : half(nb::dlpack::dtype_code::Bfloat);
    case OSP_FLOAT16: return half(nb::dlpack::dtype_code::Float);
    default: return nb::dtype<float>();
  }
}

}  // namespace

osp_dtype_t dtype_of(nb::dlpack::dtype type) {
  const auto is = [&](nb::dlpack::dtype_code code, uint8_t bits) {
    return type.code == static_cast<uint8_t>(code) && type.bits == bits && type.lanes == 1;
  };
  if (is(nb::dlpack::dtype_code::Float, 32)) return OSP_FLOAT32;
  if (is(nb::dlpack::dtype_code::Float, 16)) return OSP_FLOAT16;
  if (is(nb::dlpack::dtype_code::Bfloat, 16)) return OSP_BFLOAT16;
  // NumPy has no bf16: its bits come as uint16.
  if (is(nb::dlpack::dtype_code::UInt, 16)) return OSP_BFLOAT16;
  throw nb::type_error(
      "the engine takes float32, bfloat16 (in NumPy its bits as uint16) and float16 arrays");
}

nb::object view_memory(uintptr_t address, const std::vector<uint64_t>& shape, osp_dtype_t dtype,
                       nb::handle owner, bool numpy, bool writable, int cuda_device) {
  const std::vector<size_t> extents(shape.begin(), shape.end());
  const int device_type = cuda_device >= 0 ? nb::device::cuda::value : nb::device::cpu::value;
  const int device = cuda_device >= 0 ? cuda_device : 0;
  // NOLINTNEXTLINE: an address that the engine handed out
  void* memory = reinterpret_cast<void*>(address);
  const nb::dlpack::dtype type = dlpack_dtype(dtype, numpy);
  if (!numpy) {
    return nb::cast(nb::ndarray<>(memory, extents.size(), extents.data(), owner, nullptr, type,
                                  device_type, device));
  }
  if (writable) {
    return nb::cast(nb::ndarray<nb::numpy>(memory, extents.size(), extents.data(), owner, nullptr,
                                           type, device_type, device));
  }
  return nb::cast(nb::ndarray<nb::numpy, nb::ro>(memory, extents.size(), extents.data(), owner,
                                                 nullptr, type, device_type, device));
}

}  // namespace overspill::python
