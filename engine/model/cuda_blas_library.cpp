// dlopen and dlsym.
#include "engine/model/cuda_blas_library.h"

#include <dlfcn.h>

#include <cstdlib>
#include <string>

#include "engine/base/error.h"

namespace overspill::cuda {
namespace {

std::string last_dl_error() {
  const char* text = dlerror();
  return text ? text : "no reason given";
}

void* open_library(const std::string& path) {
  if (void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) return handle;
  fail(ErrorCode::not_found,
       "cannot open cuBLASLt, which matrix products on the GPU come from: {}; install it (\"pip "
       "install nvidia-cublas\" or NVIDIA's apt package libcublas-{}-0) and put its folder on "
       "LD_LIBRARY_PATH, or set OVERSPILL_CUBLASLT_LIBRARY to the path of libcublasLt.so.{}",
       last_dl_error(), CUBLAS_VER_MAJOR, CUBLAS_VER_MAJOR);
}

}  // namespace

BlasLibrary open_blas_library() {
  const char* chosen = std::getenv("OVERSPILL_CUBLASLT_LIBRARY");
  const std::string path =
      chosen && *chosen ? chosen : fmt::format("libcublasLt.so.{}", CUBLAS_VER_MAJOR);
  void* const handle = open_library(path);
  const auto resolve = [&]<class F>(F*& function, const char* name) {
    function = reinterpret_cast<F*>(dlsym(handle, name));
    if (function) return;
    fail(ErrorCode::invalid_config,
         "{} has no function {}: it is no cuBLASLt of version {}; set OVERSPILL_CUBLASLT_LIBRARY "
         "to the path of one",
         path, name, CUBLAS_VER_MAJOR);
  };
  BlasLibrary library{};
  resolve(library.status_text, "cublasLtGetStatusString");
  resolve(library.create, "cublasLtCreate");
  resolve(library.destroy, "cublasLtDestroy");
  resolve(library.create_product, "cublasLtMatmulDescCreate");
  resolve(library.destroy_product, "cublasLtMatmulDescDestroy");
  resolve(library.set_product, "cublasLtMatmulDescSetAttribute");
  resolve(library.create_layout, "cublasLtMatrixLayoutCreate");
  resolve(library.destroy_layout, "cublasLtMatrixLayoutDestroy");
  resolve(library.create_preference, "cublasLtMatmulPreferenceCreate");
  resolve(library.destroy_preference, "cublasLtMatmulPreferenceDestroy");
  resolve(library.set_preference, "cublasLtMatmulPreferenceSetAttribute");
  resolve(library.choose, "cublasLtMatmulAlgoGetHeuristic");
  resolve(library.matmul, "cublasLtMatmul");
  return library;
}

}  // namespace overspill::cuda
