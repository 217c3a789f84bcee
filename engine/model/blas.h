// Single-precision matrix product in the calling thread. Internal to engine/model.
#pragma once

#include <cblas.h>

#include <cstdint>
#include <mutex>

namespace overspill::host {

/// C = alpha op(A) op(B) + beta C, row-major: C is m x n, the inner extent k.
inline void gemm(CBLAS_TRANSPOSE ta, CBLAS_TRANSPOSE tb, uint64_t m, uint64_t n, uint64_t k,
                 float alpha, const float* a, uint64_t lda, const float* b, uint64_t ldb,
                 float beta, float* c, uint64_t ldc) {
  // OpenBLAS must not split the product: tasks are the only parallelism here. Its OpenMP build
  // keeps the number of threads per calling thread. Setting it frees shared buffers without a lock:
  // two threads at once could free one that a third has just taken, and products would be garbage.
  thread_local const bool one_thread = [] {
    static std::mutex mutex;
    const std::lock_guard lock(mutex);
    openblas_set_num_threads(1);
    return true;
  }();
  (void)one_thread;
  cblas_sgemm(CblasRowMajor, ta, tb, static_cast<int>(m), static_cast<int>(n), static_cast<int>(k),
              alpha, a, static_cast<int>(lda), b, static_cast<int>(ldb), beta, c,
              static_cast<int>(ldc));
}

}  // namespace overspill::host
