// Stands for the tests of CUDA code where they cannot be built, so that the skip is seen.
#include <gtest/gtest.h>

TEST(EmulatedCuda, Skipped) {
  GTEST_SKIP() << "built without CUDA's headers, or not for x86-64: no kernel was tested";
}
