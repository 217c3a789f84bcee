// Element types as safetensors and Hugging Face name them, and bf16/f16 conversions.
// bf16 rounding is to nearest even, NaN stays NaN. Pure functions.
#pragma once

#include <bit>
#include <cstdint>

namespace overspill {

enum class DType : uint8_t { f32, bf16, f16 };

constexpr uint32_t dtype_bytes(DType type) { return type == DType::f32 ? 4 : 2; }
/// "F32", "BF16", "F16": safetensors' spelling.
constexpr const char* dtype_name(DType type) {
  return type == DType::f32 ? "F32" : type == DType::bf16 ? "BF16" : "F16";
}

inline float bf16_to_float(uint16_t value) {
  return std::bit_cast<float>(static_cast<uint32_t>(value) << 16);
}

inline uint16_t float_to_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet_nan = (bits >> 16) | 0x40u;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded);
}

inline float f16_to_float(uint16_t value) {
  const uint32_t sign = static_cast<uint32_t>(value & 0x8000u) << 16;
  const uint32_t exponent = (value >> 10) & 0x1fu, mantissa = value & 0x3ffu;
  if (exponent == 0) {  // zero and subnormals: mantissa * 2^-24
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return sign ? -magnitude : magnitude;
  }
  const uint32_t bits =
      exponent == 31 ? 0x7f800000u | (mantissa << 13) : ((exponent + 112) << 23) | (mantissa << 13);
  return std::bit_cast<float>(sign | bits);
}

}  // namespace overspill
