// The arithmetic of reductions on the host: contributions rounded to bf16, sums in float32 in the
// order of ranks, so that bits do not depend on which contribution arrived first. Pure functions.
#pragma once

#include <cstdint>
#include <span>

namespace overspill {

/// To nearest, ties to even.
void round_to_bf16(std::span<const float> values, uint16_t* rounded);
void widen_bf16(const uint16_t* rounded, std::span<float> values);

/// sum[i] = ((contributions[0][i] + contributions[1][i]) + ...) in float32. `sum` may be one of
/// the contributions.
void sum_in_rank_order(std::span<const float* const> contributions, std::span<float> sum);
void sum_in_rank_order(std::span<const uint16_t* const> contributions, std::span<float> sum);

}  // namespace overspill
