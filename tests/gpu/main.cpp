// The kernels', libraries' and devices' tests on a real GPU. Exits with 77, which ctest takes for
// skipped, where there is none.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "offload/cuda_device.h"

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  const overspill::CudaGpus found = overspill::cuda_devices();
  if (found.gpus.empty() && !GTEST_FLAG_GET(list_tests)) {
    fmt::print(stderr, "overspill_gpu_tests: skipped, for there is no GPU: {}\n", found.absence);
    return 77;
  }
  for (const overspill::CudaGpu& gpu : found.gpus) {
    fmt::print("GPU {}: {}, compute capability {}.{}\n", gpu.index, gpu.name, gpu.capability_major,
               gpu.capability_minor);
  }
  return RUN_ALL_TESTS();
}
