// Tests on real GPUs. Exits with 77, which ctest takes for skipped, where there is none.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "offload/cuda_device.h"
#include "tests/contract/devices.h"

namespace {

constexpr size_t kMostRanks = 4;  // each with a GPU of its own
constexpr const char* kTestsOfRanks = "-*ZeroStages*:RanksTest*:*TwoRanks*";

}  // namespace

bool overspill::test::gpu_under_test() { return true; }

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  const overspill::CudaGpus found = overspill::cuda_devices();
  if (found.gpus.empty() && !GTEST_FLAG_GET(list_tests)) {
    fmt::print(stderr, "{}: skipped, for there is no GPU: {}\n", argv[0], found.absence);
    return 77;
  }
  for (const overspill::CudaGpu& gpu : found.gpus) {
    fmt::print("GPU {}: {}, compute capability {}.{}\n", gpu.index, gpu.name, gpu.capability_major,
               gpu.capability_minor);
  }
  if (found.gpus.size() < kMostRanks && GTEST_FLAG_GET(filter) == "*") {
    fmt::print("without the tests of several ranks: they need {} GPUs\n", kMostRanks);
    GTEST_FLAG_SET(filter, kTestsOfRanks);
  }
  return RUN_ALL_TESTS();
}
