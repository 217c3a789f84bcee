// Resolves the functions.
#include "engine/model/cuda_blas_library.h"

#include "engine/base/error.h"
#include "engine/base/shared_library.h"

namespace overspill::cuda {
BlasLibrary open_blas_library() {
  const SharedLibrary file(
      {.title = "cuBLASLt",
       .purpose = "which matrix products on the GPU come from",
       .variable = "OVERSPILL_CUBLASLT_LIBRARY",
       .file = fmt::format("libcublasLt.so.{}", CUBLAS_VER_MAJOR),
       .packages =
           fmt::format("\"pip install nvidia-cublas\" or NVIDIA's apt package libcublas-{}-0",
                       CUBLAS_VER_MAJOR),
       .version = fmt::format("{}", CUBLAS_VER_MAJOR)});
  const auto resolve = [&](auto*& function, const char* name) {
    file.require().resolve(function, name);
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
