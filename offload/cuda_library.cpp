// dlopen and dlsym.
#include "offload/cuda_library.h"

#include <dlfcn.h>

#include <cstdlib>
#include <string>

#include "engine/base/error.h"

namespace overspill {
namespace {

constexpr int kMajor = CUDART_VERSION / 1000;

std::string last_dl_error() {
  const char* text = dlerror();
  return text ? text : "no reason given";
}

void* open_library(const std::string& path) {
  if (void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) return handle;
  fail(ErrorCode::not_found,
       "cannot open the CUDA runtime, which GPUs are used through: {}; install it (\"pip install "
       "nvidia-cuda-runtime\" or NVIDIA's package cuda-cudart-{}-0) and put its folder on "
       "LD_LIBRARY_PATH, or set OVERSPILL_CUDART to the path of libcudart.so.{}",
       last_dl_error(), kMajor, kMajor);
}

}  // namespace

CudaLibrary open_cuda_library() {
  const char* chosen = std::getenv("OVERSPILL_CUDART");
  const std::string path = chosen && *chosen ? chosen : fmt::format("libcudart.so.{}", kMajor);
  void* const handle = open_library(path);
  const auto resolve = [&]<class F>(F*& function, const char* name) {
    function = reinterpret_cast<F*>(dlsym(handle, name));
    if (function) return;
    fail(ErrorCode::invalid_config,
         "{} has no function {}: it is no CUDA runtime of version {}; install that one or set "
         "OVERSPILL_CUDART to its path",
         path, name, kMajor);
  };
  CudaLibrary library;
#define OVERSPILL_CUDA_RESOLVE(name) resolve(library.name, #name);
  OVERSPILL_CUDA_FUNCTIONS(OVERSPILL_CUDA_RESOLVE)
#undef OVERSPILL_CUDA_RESOLVE
  int version = 0;
  if (library.cudaRuntimeGetVersion(&version) != cudaSuccess || version / 1000 != kMajor) {
    fail(ErrorCode::invalid_config,
         "{} is CUDA {}.{}, this build needs CUDA {}; install that one or set OVERSPILL_CUDART to "
         "its path",
         path, version / 1000, version % 1000 / 10, kMajor);
  }
  return library;
}

}  // namespace overspill
