// Counter-based random numbers: a value is a pure function of (key, counter), so that no bit of a
// result depends on order, threads or placement. Not for cryptography.
#pragma once

#include <cmath>
#include <cstdint>

namespace overspill {

/// SplitMix64's finaliser (Steele, Lea, Flood 2014): a bijective mix of 64 bits.
constexpr uint64_t mix64(uint64_t value) {
  value += 0x9e3779b97f4a7c15ull;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ull;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebull;
  return value ^ (value >> 31);
}

/// 64 random bits for (key, counter).
constexpr uint64_t random_bits(uint64_t key, uint64_t counter) {
  return mix64(mix64(key) ^ (counter * 0xd1342543de82ef95ull));
}

/// Uniform in [0, bound), bound > 0 (multiply-shift; bias below 2^-32 for bound < 2^32).
inline uint64_t random_below(uint64_t key, uint64_t counter, uint64_t bound) {
  return static_cast<uint64_t>(
      (static_cast<unsigned __int128>(random_bits(key, counter)) * bound) >> 64);
}

/// Standard normal for (key, counter), Box and Muller 1958.
inline float random_normal(uint64_t key, uint64_t counter) {
  const uint64_t bits = random_bits(key, counter);
  const double u1 = (static_cast<double>(bits >> 32) + 0.5) * 0x1p-32;
  const double u2 = static_cast<double>(bits & 0xffffffffu) * 0x1p-32;
  return static_cast<float>(std::sqrt(-2.0 * std::log(u1)) * std::cos(6.283185307179586 * u2));
}

}  // namespace overspill
