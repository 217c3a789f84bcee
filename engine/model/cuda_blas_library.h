// NVIDIA's cuBLASLt, opened at run time, so that one binary starts without it. Types and numbers
// are those of NVIDIA's headers.
#pragma once

#include <cublasLt.h>

namespace overspill::cuda {

/// The functions that are used.
struct BlasLibrary {
  decltype(&cublasLtGetStatusString) status_text;
  decltype(&cublasLtCreate) create;
  decltype(&cublasLtDestroy) destroy;
  decltype(&cublasLtMatmulDescCreate) create_product;
  decltype(&cublasLtMatmulDescDestroy) destroy_product;
  decltype(&cublasLtMatmulDescSetAttribute) set_product;
  decltype(&cublasLtMatrixLayoutCreate) create_layout;
  decltype(&cublasLtMatrixLayoutDestroy) destroy_layout;
  decltype(&cublasLtMatmulPreferenceCreate) create_preference;
  decltype(&cublasLtMatmulPreferenceDestroy) destroy_preference;
  decltype(&cublasLtMatmulPreferenceSetAttribute) set_preference;
  decltype(&cublasLtMatmulAlgoGetHeuristic) choose;
  decltype(&cublasLtMatmul) matmul;
};

/// libcublasLt.so of the headers' major version, or the file that the environment's
/// OVERSPILL_CUBLASLT_LIBRARY names. It stays loaded. Throws Error(not_found) saying how to install
/// it, or Error(invalid_config) for a file that is something else.
BlasLibrary open_blas_library();

}  // namespace overspill::cuda
