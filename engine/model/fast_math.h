// exp in plain arithmetic that compilers vectorise; the same bits on every instruction set.
#pragma once

#include <bit>
#include <cstdint>

namespace overspill {

/// e^x, relative error below 2e-7 over [-87, 88]; clamps outside. Cody-Waite reduction by ln 2 and
/// a degree-6 minimax polynomial (coefficients: Cephes' expf, Moshier 1992). NaN stays NaN.
[[gnu::always_inline]] inline float exp_fast(float x) {
  const float kept = x;
  x = x < -87.0f ? -87.0f : x;
  x = x > 88.0f ? 88.0f : x;
  const float n = (x * 1.44269504088896341f + 12582912.0f) - 12582912.0f;
  const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const int32_t exponent = (static_cast<int32_t>(n) + 127) << 23;
  const float result = p * std::bit_cast<float>(exponent);
  return kept != kept ? kept : result;
}

/// Sums in 16 interleaved lanes, then the lanes in order: a fixed order that vectorises.
inline constexpr uint64_t kSumLanes = 16;

}  // namespace overspill
