// Resolves the functions.
#include "offload/cuda_library.h"

#include <cstdlib>

#include "engine/base/error.h"
#include "engine/base/shared_library.h"
#include "offload/cuda_linked.h"

namespace overspill {
namespace {

constexpr int kMajor = CUDART_VERSION / 1000;
constexpr const char* kVariable = "OVERSPILL_CUDART";

}  // namespace

CudaLibrary open_cuda_library() {
  const CudaLibrary* const linked = linked_cuda_library();
  if (linked != nullptr && std::getenv(kVariable) == nullptr) return *linked;
  const SharedLibrary file(
      {.title = "CUDA runtime",
       .purpose = "which GPUs are used through",
       .variable = kVariable,
       .file = fmt::format("libcudart.so.{}", kMajor),
       .packages = fmt::format(
           "\"pip install nvidia-cuda-runtime\" or NVIDIA's package cuda-cudart-{}-0", kMajor),
       .version = fmt::format("{}", kMajor)});
  const auto resolve = [&](auto*& function, const char* name) {
    file.require().resolve(function, name);
  };
  CudaLibrary library;
#define OVERSPILL_CUDA_RESOLVE(name) resolve(library.name, #name);
  OVERSPILL_CUDA_FUNCTIONS(OVERSPILL_CUDA_RESOLVE)
#undef OVERSPILL_CUDA_RESOLVE
  int version = 0;
  if (library.cudaRuntimeGetVersion(&version) != cudaSuccess || version / 1000 != kMajor) {
    file.refuse_version(fmt::format("{}.{}", version / 1000, version % 1000 / 10));
  }
  return library;
}

}  // namespace overspill
