// Sums of every type, over blocks and ends.
#include "engine/model/add_gradient.h"

#include <gtest/gtest.h>

#include <vector>

#include "engine/base/random.h"

namespace overspill {
namespace {

TEST(AddGradient, AddsEveryType) {
  constexpr uint64_t kCount = 200'003;
  std::vector<float> wide(kCount);
  std::vector<uint16_t> bf16(kCount), f16(kCount);
  for (uint64_t i = 0; i < kCount; ++i) {
    wide[i] = random_normal(1, i);
    bf16[i] = float_to_bf16(wide[i]);
    f16[i] = static_cast<uint16_t>(0x3c00 + i % 1024);  // 1 to 2
  }
  std::vector<float> sums(kCount, -7.0f);
  add_gradient(wide.data(), DType::f32, sums.data(), kCount, true);
  EXPECT_EQ(sums, wide);
  add_gradient(bf16.data(), DType::bf16, sums.data(), kCount, false);
  add_gradient(f16.data(), DType::f16, sums.data(), kCount, false);
  for (uint64_t i = 0; i < kCount; ++i) {
    ASSERT_EQ(sums[i], wide[i] + bf16_to_float(bf16[i]) + f16_to_float(f16[i])) << i;
  }
}

}  // namespace
}  // namespace overspill
