// Moments in bf16 and in 8 bits: error bounds, rounding without bias over all random numbers,
// edges, and that moments follow a constant gradient instead of getting stuck.
#include "optim/moment_formats.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "tests/unit/optim/chunk_fixture.h"

namespace overspill {
namespace {

/// rounding_bits whose noise for the first, or the second moment is n, n < 2^16.
uint32_t first_random(uint32_t n) { return n << 4; }
uint32_t second_random(uint32_t n) { return n << 16; }

/// Values spread over magnitudes, positive, up to `largest`.
std::vector<float> sample(float largest, size_t count) {
  std::vector<float> values;
  for (size_t i = 0; i < count; ++i) {
    const auto u = static_cast<double>(random_bits(5, i) >> 11) * 0x1p-53;
    values.push_back(largest * static_cast<float>(std::pow(10.0, -11 * u)));
  }
  return values;
}

TEST(MomentFormats, RandomHalvesAreUniformAndIndependent) {
  constexpr int kBlocks = 4000;
  double low = 0, high = 0, product = 0, next = 0;
  std::vector<int> buckets(256);
  for (uint64_t block = 0; block < kBlocks; ++block) {
    const uint64_t key = block_rounding_key(1, 2, block);
    double previous = 0;
    for (uint32_t i = 0; i < kStateBlock; ++i) {
      const uint32_t bits = rounding_bits(key, i);
      const double a = (bits & 0xffffu) / 65536.0 - 0.5, b = (bits >> 16) / 65536.0 - 0.5;
      low += a, high += b, product += a * b, next += a * previous;
      previous = a;
      ++buckets[bits >> 8 & 0xffu];
    }
  }
  constexpr double kCount = kBlocks * 256.0;
  const double deviation = std::sqrt(1.0 / 12 / kCount), of_product = 1.0 / 12 / std::sqrt(kCount);
  EXPECT_LT(std::abs(low / kCount), 4 * deviation);
  EXPECT_LT(std::abs(high / kCount), 4 * deviation);
  EXPECT_LT(std::abs(product / kCount), 4 * of_product);
  EXPECT_LT(std::abs(next / kCount), 4 * of_product);
  double chi_squared = 0;
  for (const int count : buckets) chi_squared += std::pow(count - kCount / 256, 2) * 256 / kCount;
  EXPECT_LT(chi_squared, 255 + 5 * std::sqrt(2 * 255.0));
}

TEST(MomentFormats, Bf16IsExactInTheMean) {
  for (const float value : {1.0f, 1.0f + 0x1p-23f, 3.14159f, -2.71828f, 1e-30f, -1e-42f, 0.0f}) {
    double sum = 0;
    for (uint32_t random = 0; random < 65536; ++random) {
      const float rounded = bf16_to_float(round_to_bf16(value, random));
      ASSERT_LE(std::abs(rounded - value), std::max(std::abs(value) * 0x1p-7f, 0x1p-133f));
      sum += rounded;
    }
    EXPECT_EQ(sum / 65536, value);
  }
}

TEST(MomentFormats, LargestValueIsExactWhateverTheRandomBits) {
  for (const float size : {0x1p-90f, 1e-12f, 1.0f, 3e8f, 1e30f}) {
    for (uint64_t i = 0; i < 20000; ++i) {
      const float largest = size * (1 + static_cast<float>(random_bits(1, i) >> 41) * 0x1p-23f);
      const float scale = block_scale(largest);
      ASSERT_EQ(scale, largest);
      for (const uint32_t random : {0u, 0xffffffffu, rounding_bits(9, static_cast<uint32_t>(i))}) {
        const float first = level_factor(scale, kFirstTop);
        ASSERT_EQ(encode_first(largest, first, random), 0x7f);
        ASSERT_EQ(encode_first(-largest, first, random), 0xff);
        ASSERT_EQ(encode_second(largest, level_factor(scale, kSecondTop), random), 0xff);
      }
      ASSERT_EQ(decode_first(0x7f, scale), largest);
      ASSERT_EQ(decode_first(0xff, scale), -largest);
      ASSERT_EQ(decode_second(0xff, scale), largest);
    }
  }
}

TEST(MomentFormats, LevelsAscendAndAreAsFarApartAsPromised) {
  float before = 0;
  for (uint32_t code = 1; code < 256; ++code) {
    const float level = decode_second(static_cast<uint8_t>(code), kSecondTop);
    const float bound = std::max(0.25f, before / 4);
    ASSERT_GT(level, before);
    ASSERT_LE(level - before, bound * (1 + 1e-5f)) << code;
    if (code < 128) {
      ASSERT_FLOAT_EQ(decode_first(static_cast<uint8_t>(code), kFirstTop), level);
    }
    before = level;
  }
  EXPECT_EQ(decode_first(0, 1.0f), 0.0f);
  EXPECT_EQ(decode_second(0, 1.0f), 0.0f);
}

TEST(MomentFormats, EightBitErrorsAreBoundedAndMeanZero) {
  for (const float scale : {1.0f, 3.7e-9f}) {
    const float first = level_factor(scale, kFirstTop), second = level_factor(scale, kSecondTop);
    for (const float value : sample(scale, 60)) {
      double first_sum = 0, second_sum = 0;
      const float first_bound = std::max(scale / (4 * kFirstTop), value / 4) * (1 + 1e-4f);
      const float second_bound = std::max(scale / (4 * kSecondTop), value / 4) * (1 + 1e-4f);
      for (uint32_t n = 0; n < 65536; ++n) {
        const float m = decode_first(encode_first(-value, first, first_random(n)), scale);
        const float v = decode_second(encode_second(value, second, second_random(n)), scale);
        ASSERT_LE(std::abs(m + value), first_bound) << value;
        ASSERT_LE(std::abs(v - value), second_bound) << value;
        first_sum += m;
        second_sum += v;
      }
      EXPECT_NEAR(first_sum / 65536, -value, 0x1p-15 * first_bound);
      if (value / scale < 0.25f / kSecondTop) continue;  // below the smallest level: raised to it
      EXPECT_NEAR(second_sum / 65536, value, 0x1p-15 * second_bound);
    }
  }
}

TEST(MomentFormats, PositiveSecondMomentsNeverBecomeZero) {
  for (const float scale : {1e-20f, 1.0f, 1e20f}) {
    const float factor = level_factor(scale, kSecondTop);
    for (const float value : {std::numeric_limits<float>::denorm_min(), scale * 1e-12f}) {
      for (const uint32_t random : {0u, 0xffffffffu}) {
        EXPECT_EQ(encode_second(value, factor, random), 1);
      }
    }
    EXPECT_EQ(encode_second(0.0f, factor, 0xffffffffu), 0);
  }
}

TEST(MomentFormats, ZeroAndTinyBlocks) {
  EXPECT_EQ(block_scale(0.0f), 0.0f);
  EXPECT_EQ(level_factor(0.0f, kFirstTop), 0.0f);
  EXPECT_EQ(encode_first(0.0f, 0.0f, 0xffffffffu), 0);
  EXPECT_EQ(encode_second(0.0f, 0.0f, 0xffffffffu), 0);
  EXPECT_EQ(decode_first(0, 0.0f), 0.0f);
  const float scale = block_scale(1e-40f);
  EXPECT_EQ(scale, 0x1p-90f);
  EXPECT_TRUE(std::isfinite(level_factor(scale, kSecondTop)));
  EXPECT_EQ(encode_second(1e-40f, level_factor(scale, kSecondTop), 0), 1);
}

/// Means over parameters and the last half of `steps` of both moments, divided by what float32
/// moments would become.
std::pair<double, double> follow_constant_gradient(StateFormat state, uint64_t steps, double beta1,
                                                   double beta2) {
  constexpr uint64_t kSize = 16 * kStateBlock;
  const OptimizerSettings settings{.state = state, .beta1 = beta1, .beta2 = beta2, .seed = 3};
  TestChunk chunk(settings, std::vector<float>(kSize));
  std::vector<float> gradient;
  for (uint64_t i = 0; i < kSize; ++i) gradient.push_back(i % 2 == 0 ? 1.0f : 0.0625f);
  chunk.set_gradient(gradient);
  const UpdateRun runs[] = {{0, kSize}};
  const double rate = 0;
  double first = 0, second = 0, count = 0;
  for (uint64_t t = 1; t <= steps; ++t) {
    chunk.update(update_step(settings, std::span(&rate, 1), t, 1.0), runs, t == 1);
    if (t < steps / 2 || t % 16 != 0) continue;
    const std::vector<float> m = chunk.firsts(kSize), v = chunk.seconds(kSize);
    const double tt = static_cast<double>(t);
    for (uint64_t i = 0; i < kSize; ++i) {
      first += m[i] / gradient[i] / (1 - std::pow(beta1, tt));
      second += v[i] / (gradient[i] * gradient[i]) / (1 - std::pow(beta2, tt));
      ++count;
    }
  }
  return {first / count, second / count};
}

TEST(MomentFormats, MomentsFollowAConstantGradient) {
  for (const StateFormat state : {StateFormat::bfloat16, StateFormat::int8}) {
    // Without stochastic rounding a moment stops once its steps are below half a unit: 0.999 of
    // the way would never come.
    const auto [first, second] = follow_constant_gradient(state, 2000, 0.9, 0.999);
    EXPECT_NEAR(first, 1, 0.002);
    EXPECT_NEAR(second, 1, 0.02);
    const auto [slow, same] = follow_constant_gradient(state, 1000, 0.99, 0.95);
    EXPECT_NEAR(slow, 1, 0.005);
    EXPECT_NEAR(same, 1, 0.005);
  }
}

/// Mean squared distance from the optimum after a noisy descent. In every block gradients span four
/// powers of ten.
double distance_after_descent(OptimizerKind kind, StateFormat state) {
  constexpr uint64_t kSize = 6 * kStateBlock, kSteps = 1000;
  const OptimizerSettings settings{
      .kind = kind, .state = state, .beta2 = kind == OptimizerKind::lion ? 0.99 : 0.999, .seed = 1};
  std::vector<float> target(kSize), curvature(kSize), gradient(kSize);
  for (uint64_t i = 0; i < kSize; ++i) {
    target[i] = random_normal(1, i);
    curvature[i] = std::pow(10.0f, -static_cast<float>(i % 9) / 2);
  }
  TestChunk chunk(settings, std::vector<float>(kSize));
  const UpdateRun runs[] = {{0, kSize}};
  for (uint64_t t = 1; t <= kSteps; ++t) {
    const std::vector<float> weight = chunk.masters(kSize);
    for (uint64_t i = 0; i < kSize; ++i) {
      const float noise = random_normal(100 + t, i);
      const float exact = curvature[i] * (weight[i] - target[i] + 0.5f * noise);
      gradient[i] = bf16_to_float(float_to_bf16(exact));
    }
    chunk.set_gradient(gradient);
    const double left = 1 - static_cast<double>(t) / kSteps;
    const double rate = (kind == OptimizerKind::sgd ? 0.3 : 0.02) * left;
    chunk.update(update_step(settings, std::span(&rate, 1), t, 1.0), runs, t == 1);
  }
  double sum = 0;
  const std::vector<float> weight = chunk.masters(kSize);
  for (uint64_t i = 0; i < kSize; ++i) sum += std::pow(weight[i] - target[i], 2);
  return sum / kSize;
}

TEST(MomentFormats, NarrowStateDescendsAsFloat32Does) {
  for (const OptimizerKind kind : kKinds) {
    const double wide = distance_after_descent(kind, StateFormat::float32);
    const double halves = distance_after_descent(kind, StateFormat::bfloat16);
    const double bytes = distance_after_descent(kind, StateFormat::int8);
    EXPECT_LT(wide, 0.2);  // of 1 at the start; sgd is slow where gradients are small
    EXPECT_NEAR(halves / wide, 1, 0.05) << static_cast<int>(kind);
    EXPECT_NEAR(bytes / wide, 1, 0.05) << static_cast<int>(kind);
  }
}

}  // namespace
}  // namespace overspill
