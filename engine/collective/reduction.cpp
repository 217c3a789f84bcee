// Sums block by block: a block of the sum stays in the cache while the contributions stream by.
#include "engine/collective/reduction.h"

#include <algorithm>

#include "engine/base/dtype.h"
#include "engine/base/simd.h"

namespace overspill {
namespace {

constexpr size_t kBlock = 2048;

OVERSPILL_SIMD void store(const float* values, float* sum, size_t count) {
  for (size_t i = 0; i < count; ++i) sum[i] = values[i];
}
OVERSPILL_SIMD void store(const uint16_t* values, float* sum, size_t count) {
  for (size_t i = 0; i < count; ++i) sum[i] = bf16_to_float(values[i]);
}
OVERSPILL_SIMD void add(const float* values, float* sum, size_t count) {
  for (size_t i = 0; i < count; ++i) sum[i] += values[i];
}
OVERSPILL_SIMD void add(const uint16_t* values, float* sum, size_t count) {
  for (size_t i = 0; i < count; ++i) sum[i] += bf16_to_float(values[i]);
}
OVERSPILL_SIMD void round(const float* values, uint16_t* rounded, size_t count) {
  for (size_t i = 0; i < count; ++i) rounded[i] = float_to_bf16(values[i]);
}

template <class T>
void sum_blocks(std::span<const T* const> contributions, std::span<float> sum) {
  float block[kBlock];  // the sum may lie over a contribution that is still to be added
  for (size_t begin = 0; begin < sum.size(); begin += kBlock) {
    const size_t count = std::min(kBlock, sum.size() - begin);
    store(contributions[0] + begin, block, count);
    for (const T* contribution : contributions.subspan(1)) add(contribution + begin, block, count);
    store(block, sum.data() + begin, count);
  }
}

}  // namespace

void round_to_bf16(std::span<const float> values, uint16_t* rounded) {
  round(values.data(), rounded, values.size());
}

void widen_bf16(const uint16_t* rounded, std::span<float> values) {
  store(rounded, values.data(), values.size());
}

void sum_in_rank_order(std::span<const float* const> contributions, std::span<float> sum) {
  sum_blocks(contributions, sum);
}

void sum_in_rank_order(std::span<const uint16_t* const> contributions, std::span<float> sum) {
  sum_blocks(contributions, sum);
}

}  // namespace overspill
