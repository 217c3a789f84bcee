// How optimizer moments are coded in fewer bits: bf16, and 8-bit codes with a scale per block of
// 256. Both are rounded stochastically, so that steps smaller than a unit in the last place are
// kept in the mean. Pure functions, the reference for the vector kernels (update_kernels.cpp): the
// same operations on every target, each rounded correctly, so the bits are the same too.
//
// An 8-bit magnitude c stands for level(c) = (1 + c%8 / 8) 2^(1 + c/8) - 2, whose sum with two is a
// float32 with c in its lowest exponent and three highest mantissa bits: coding is shifts. Levels
// are 1/4 apart up to level(8) = 2, from there on between 1/4 and 1/15 of their size. The largest
// value of a block, its scale, is the top level exactly:
//   exp_avg     sign and 7 bits, top level(127) = 122878:    the smallest is scale / 491512
//   exp_avg_sq  8 bits,          top level(255) = 8.05e9:    the smallest is scale / 3.2e10
// Rounding picks one of the two levels around a value. So errors stay below max(scale / (4 top),
// |value| / 4), and their mean is zero within 2^-15 of the distance of the levels. A positive
// exp_avg_sq never becomes zero, which would explode the update: it is at least the smallest
// level, whose root is 1/179000 of the largest's, while exp_avg's smallest level is 1/491512 of
// its. One more mantissa bit and one less of exponent would halve the noise but slow down
// parameters whose gradients are 1/1000 of their block's largest, or less.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "engine/base/dtype.h"
#include "engine/base/random.h"

namespace overspill {

/// Of one block of 256 parameters in one step.
inline uint64_t block_rounding_key(uint64_t step_key, uint64_t layer, uint64_t block_of_layer) {
  return random_bits(random_bits(step_key, layer), block_of_layer);
}

inline constexpr uint32_t kIndexStride = 0x9e3779b9u;                ///< 2^32 / golden ratio, odd
inline constexpr uint32_t kMix1 = 0x7feb352du, kMix2 = 0x846ca68bu;  ///< Wellons 2018, lowbias32

/// 32 random bits for a parameter of the block. In bf16 the low half rounds the first moment, the
/// high half the second.
constexpr uint32_t rounding_bits(uint64_t block_key, uint32_t index) {
  uint32_t bits = static_cast<uint32_t>(block_key) + index * kIndexStride;
  bits = (bits ^ (bits >> 16)) * kMix1;
  bits ^= static_cast<uint32_t>(block_key >> 32);
  bits = (bits ^ (bits >> 15)) * kMix2;
  return bits ^ (bits >> 16);
}

/// To one of the two nearest bf16 values, `random` < 2^16: the value is met in the mean exactly.
/// Beyond the largest bf16 the result may be infinite.
constexpr uint16_t round_to_bf16(float value, uint32_t random) {
  return static_cast<uint16_t>((std::bit_cast<uint32_t>(value) + random) >> 16);
}

inline constexpr float kFirstTop = 122878.0f, kSecondTop = 8053063680.0f;
/// 1/top, rounded; times top it is one exactly, so the largest value is decoded to itself.
inline constexpr float kFirstTopInverse = 1.0f / kFirstTop, kSecondTopInverse = 1.0f / kSecondTop;
static_assert(kFirstTop * kFirstTopInverse == 1.0f && kSecondTop * kSecondTopInverse == 1.0f);

/// A level plus two: its bits are the code shifted, and kTwoBits.
inline constexpr uint32_t kTwoBits = 0x40000000u;
inline constexpr int kLevelShift = 20;  ///< 23 mantissa bits, 3 of them kept
/// 16 random bits below the code. The lowest four of the fraction stay free: a block's largest
/// value is up to 7 units above the top level (level_factor) and must not round past it.
inline constexpr uint32_t kNoiseMask = 0xffff0u;
inline constexpr int kNoiseShift = 12;  ///< of the second moment
constexpr uint32_t first_noise(uint32_t random) { return random & kNoiseMask; }
/// Shares four bits with first_noise, the highest there and the lowest here.
constexpr uint32_t second_noise(uint32_t random) { return (random >> kNoiseShift) & kNoiseMask; }

/// Scale of a block whose largest magnitude this is. Below 2^-90 the scale stays 2^-90, so that
/// level_factor is finite; an all-zero block has scale 0 and codes 0 (or minus 0).
constexpr float block_scale(float largest) {
  return largest == 0 ? 0.0f : std::max(largest, 0x1p-90f);
}
/// From values to levels. 2^-22 too large: after three roundings the scale itself is at least the
/// top level, and at most 7 units in the last place above it.
constexpr float level_factor(float scale, float top) {
  return scale == 0 ? 0.0f : top / scale * (1 + 0x1p-22f);
}

/// The code, and 0x400.
inline uint32_t encode_level(float magnitude, float factor, uint32_t noise) {
  return (std::bit_cast<uint32_t>(magnitude * factor + 2.0f) + noise) >> kLevelShift;
}
inline float decode_level(uint32_t code, float top_inverse, float scale) {
  return (std::bit_cast<float>(kTwoBits + (code << kLevelShift)) - 2.0f) * top_inverse * scale;
}

/// `random` are rounding_bits.
inline uint8_t encode_first(float value, float factor, uint32_t random) {
  const uint32_t bits = std::bit_cast<uint32_t>(value), sign = bits >> 24 & 0x80u;
  const auto magnitude = std::bit_cast<float>(bits & 0x7fffffffu);
  return static_cast<uint8_t>(sign | encode_level(magnitude, factor, first_noise(random)));
}
inline float decode_first(uint8_t code, float scale) {
  const float magnitude = decode_level(code & 0x7fu, kFirstTopInverse, scale);
  return code & 0x80u ? -magnitude : magnitude;
}

inline uint8_t encode_second(float value, float factor, uint32_t random) {
  const uint32_t least = value > 0 ? 0x401 : 0;
  return static_cast<uint8_t>(std::max(encode_level(value, factor, second_noise(random)), least));
}
inline float decode_second(uint8_t code, float scale) {
  return decode_level(code, kSecondTopInverse, scale);
}

}  // namespace overspill
