// The machine's single-precision matrix rate: OpenBLAS on all processors, the best of several runs.
// Prints GFLOP/s; the yardstick for compute_share.
#include <cblas.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

int main(int argc, char** argv) {
  const int size = argc > 1 ? std::atoi(argv[1]) : 3072;
  const int runs = argc > 2 ? std::atoi(argv[2]) : 7;
  if (size <= 0 || runs <= 0) {
    std::fprintf(stderr, "usage: bench_sgemm [SIZE] [RUNS]\n");
    return 2;
  }
  openblas_set_num_threads(static_cast<int>(std::thread::hardware_concurrency()));
  const size_t count = static_cast<size_t>(size) * static_cast<size_t>(size);
  std::vector<float> a(count, 1.5f), b(count, 0.5f), c(count, 0.0f);
  std::vector<double> rates;
  for (int i = 0; i < runs; ++i) {
    const auto start = std::chrono::steady_clock::now();
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, size, size, size, 1.0f, a.data(), size,
                b.data(), size, 0.0f, c.data(), size);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    rates.push_back(2.0 * static_cast<double>(count) * size / seconds.count() * 1e-9);
  }
  std::sort(rates.begin(), rates.end());
  std::printf("{\"size\": %d, \"median_gflops\": %.1f, \"best_gflops\": %.1f}\n", size,
              rates[rates.size() / 2], rates.back());
  return 0;
}
