// The exact split of a float32 master into the bf16 weight used in compute and a 16-bit remainder:
//   hi = (bits + 0x8000) >> 16,  lo = bits & 0xffff,  bits == (hi << 16) + sign_extend(lo)
// for every finite value. hi is the nearest bf16 (ties away from zero). Pure functions.
#pragma once

#include <bit>
#include <cstdint>

namespace overspill {

struct SplitMaster {
  uint16_t weight;
  int16_t remainder;
};

[[gnu::always_inline]] inline SplitMaster split_master(float master) {
  const uint32_t bits = std::bit_cast<uint32_t>(master);
  return {static_cast<uint16_t>((bits + 0x8000u) >> 16), static_cast<int16_t>(bits & 0xffffu)};
}

[[gnu::always_inline]] inline float join_master(uint16_t weight, int16_t remainder) {
  const uint32_t bits = (static_cast<uint32_t>(weight) << 16) +
                        static_cast<uint32_t>(static_cast<int32_t>(remainder));
  return std::bit_cast<float>(bits);
}

}  // namespace overspill
