// How optimizer moments are coded in fewer bits: bf16, and 8-bit codes with a scale per block of
// 256. Both are rounded stochastically, so that steps smaller than a unit in the last place are
// kept in the mean. Pure functions, the reference for the vector kernels (update_kernels.cpp): the
// same operations on every target, each rounded correctly, so the bits are the same too.
//
// An 8-bit magnitude c stands for level(c) = (1 + c%16 / 16) 2^(c/16) - 1, whose sum with one is a
// float32 with the four top mantissa bits: coding is shifts. level(0) is 0; up to level(16) = 1
// levels are 1/16 apart, from there on between 1/8 and 1/31 of their size. A block's largest value
// is the top level exactly:
//   exp_avg     sign and 7 bits, top level(127) = 247:    smallest level is largest / 3952
//   exp_avg_sq  8 bits,          top level(255) = 63487:  smallest level is largest / 1015792
// Rounding picks one of the two levels around a value. So errors stay below max(scale / (16 top),
// |value| / 8), and their mean is zero within 2^-15 of the distance of the levels. A positive
// exp_avg_sq never becomes zero, which would explode the update: it is at least the smallest
// level, the root of which is 1/1008 of the largest's; exp_avg's smallest level is 1/3952 of it.
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

/// 32 random bits for a parameter of the block: the low half rounds its first moment, the high half
/// its second.
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

inline constexpr float kFirstTop = 247.0f, kSecondTop = 63487.0f;
/// 1/top, rounded; times top it is one exactly, so the largest value is decoded to itself.
inline constexpr float kFirstTopInverse = 1.0f / kFirstTop, kSecondTopInverse = 1.0f / kSecondTop;
static_assert(kFirstTop * kFirstTopInverse == 1.0f && kSecondTop * kSecondTopInverse == 1.0f);

inline constexpr uint32_t kOneBits = 0x3f800000u;
inline constexpr int kLevelShift = 19;  ///< 23 mantissa bits, 4 of them kept

/// Scale of a block whose largest magnitude this is. Below 2^-100 the scale stays 2^-100, so that
/// level_factor is finite; an all-zero block has scale 0 and codes 0.
constexpr float block_scale(float largest) {
  return largest == 0 ? 0.0f : std::max(largest, 0x1p-100f);
}
/// From values to levels, scale > 0. A little large, so that the largest value surely reaches the
/// top level (levels beyond are cut off).
constexpr float level_factor(float scale, float top) { return top / scale * (1 + 0x1p-22f); }

/// Code of a magnitude, `random` < 2^16.
inline uint32_t encode_level(float magnitude, float factor, float top, uint32_t random) {
  const float shifted = std::min(magnitude * factor + 1.0f, top + 1.0f);
  return (std::bit_cast<uint32_t>(shifted) - kOneBits + (random << 3 | 4)) >> kLevelShift;
}
inline float decode_level(uint32_t code, float top_inverse, float scale) {
  return (std::bit_cast<float>(kOneBits + (code << kLevelShift)) - 1.0f) * top_inverse * scale;
}

inline uint8_t encode_first(float value, float factor, uint32_t random) {
  const uint32_t sign = std::bit_cast<uint32_t>(value) >> 31 << 7;
  const float magnitude = std::bit_cast<float>(std::bit_cast<uint32_t>(value) & 0x7fffffffu);
  return static_cast<uint8_t>(sign | encode_level(magnitude, factor, kFirstTop, random));
}
inline float decode_first(uint8_t code, float scale) {
  const float magnitude = decode_level(code & 0x7fu, kFirstTopInverse, scale);
  return code & 0x80u ? -magnitude : magnitude;
}

inline uint8_t encode_second(float value, float factor, uint32_t random) {
  const uint32_t least = value > 0 ? 1 : 0;
  return static_cast<uint8_t>(std::max(encode_level(value, factor, kSecondTop, random), least));
}
inline float decode_second(uint8_t code, float scale) {
  return decode_level(code, kSecondTopInverse, scale);
}

}  // namespace overspill
