// The update of whole blocks, written once with Google Highway and compiled for each of its
// targets. Every target gives the same bits: only +, -, *, / and sqrt are used, which IEEE 754
// rounds correctly, never a fused multiply-add (the project compiles with -ffp-contract=off), and a
// block's maximum does not depend on the order. Rounding follows optim/moment_formats.h operation
// by operation. Moments in 8 bits take two passes over a block that stays in the first-level cache.
#include "optim/update_kernels.h"

#include <algorithm>
#include <cmath>

#include "optim/moment_formats.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optim/update_kernels.cpp"
#define HWY_DISABLED_TARGETS HWY_SSSE3  // such processors use the portable target
#include <hwy/foreach_target.h>
// foreach_target must come before highway.
#include <hwy/cache_control.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace overspill {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

#include "optim/update_vectors.inc"

/// Adafactor's step along g / sqrt(v).
HWY_INLINE FloatVector normalised(const UpdateBlocks& a, FloatVector p, FloatVector g,
                                  FloatVector v) {
  const auto change = hn::Mul(hn::Set(kFloats, a.step_size), hn::Div(g, hn::Sqrt(v)));
  return hn::Sub(hn::Mul(p, hn::Set(kFloats, a.decay)), change);
}

/// One vector of parameters: returns the new masters and changes the moments.
template <OptimizerKind kKind, bool kMomentum>
HWY_INLINE FloatVector update(const UpdateBlocks& a, FloatVector p, FloatVector g, FloatVector& m,
                              FloatVector& v) {
  const auto set = [](float value) HWY_ATTR { return hn::Set(kFloats, value); };
  g = hn::Mul(g, set(a.gradient_scale));
  if constexpr (kKind == OptimizerKind::adamw) {
    p = hn::Mul(p, set(a.decay));
    m = hn::Add(m, hn::Mul(set(a.one_minus_beta1), hn::Sub(g, m)));
    v = hn::Add(hn::Mul(set(a.beta2), v), hn::Mul(hn::Mul(set(a.one_minus_beta2), g), g));
    const auto root = hn::Mul(hn::Sqrt(v), set(a.inverse_sqrt_bias2));
    const auto ratio = hn::Div(m, hn::Add(root, set(a.epsilon)));
    return hn::Sub(p, hn::Mul(set(a.step_size), ratio));
  } else if constexpr (kKind == OptimizerKind::lion) {
    p = hn::Mul(p, set(a.decay));
    const auto direction = hn::Add(hn::Mul(set(a.beta1), m), hn::Mul(set(a.one_minus_beta1), g));
    const auto moves = hn::Ne(direction, hn::Zero(kFloats));
    m = hn::Add(hn::Mul(set(a.beta2), m), hn::Mul(set(a.one_minus_beta2), g));
    return hn::Sub(p, hn::IfThenElseZero(moves, hn::CopySign(set(a.step_size), direction)));
  } else if constexpr (kKind == OptimizerKind::adafactor) {
    const auto square = hn::Add(hn::Mul(g, g), set(a.epsilon));
    v = hn::Add(hn::Mul(set(a.beta2), v), hn::Mul(set(a.one_minus_beta2), square));
    return normalised(a, p, g, v);
  } else {
    g = hn::Add(g, hn::Mul(set(a.decay), p));
    if constexpr (kMomentum) {
      m = hn::Add(hn::Mul(set(a.beta1), m), g);
      g = m;
    }
    return hn::Sub(p, hn::Mul(set(a.step_size), g));
  }
}

template <OptimizerKind kKind, bool kMomentum>
struct Has {
  static constexpr bool first =
      kKind == OptimizerKind::sgd ? kMomentum : kKind != OptimizerKind::adafactor;
  static constexpr bool second = kKind == OptimizerKind::adamw || kKind == OptimizerKind::adafactor;
};

template <OptimizerKind kKind, MasterFormat kMaster, bool kMomentum>
void update_float32(UpdateBlocks a) {
  using Moments = Has<kKind, kMomentum>;
  const size_t size = a.blocks * kStateBlock;
  for (size_t i = 0; i < size; i += hn::Lanes(kFloats)) {
    prefetch_parameters<kMaster>(a, i);
    if constexpr (Moments::first) prefetch(a.first, i, 4);
    if constexpr (Moments::second) prefetch(a.second, i, 4);
    auto m = hn::Zero(kFloats), v = hn::Zero(kFloats);
    if constexpr (Moments::first) m = hn::LoadU(kFloats, as<float>(a.first) + i);
    if constexpr (Moments::second) v = hn::LoadU(kFloats, as<float>(a.second) + i);
    const auto p =
        update<kKind, kMomentum>(a, load_master<kMaster>(a, i), load_gradient<kMaster>(a, i), m, v);
    store_master<kMaster>(p, a, i);
    if constexpr (Moments::first) hn::StoreU(m, kFloats, as<float>(a.first) + i);
    if constexpr (Moments::second) hn::StoreU(v, kFloats, as<float>(a.second) + i);
  }
}

/// Walks a matrix's elements in order: sqrt(mean(row) / row) and the column's average of each.
class FactorWalk {
 public:
  HWY_INLINE explicit FactorWalk(const UpdateBlocks& a)
      : rows_(a.averages + a.matrix.first),
        columns_(a.averages + a.matrix.column_first()),
        mean_(a.averages[a.matrix.mean()]),
        row_count_(a.matrix.rows),
        column_count_(a.matrix.columns),
        row_(a.element / column_count_),
        column_(a.element % column_count_) {
    scale_row();
  }

  HWY_INLINE void next(FloatVector& scale, FloatVector& column) {
    if (column_ == column_count_) next_row();
    if (column_ + hn::Lanes(kFloats) <= column_count_) {
      scale = hn::Set(kFloats, scale_);
      column = hn::LoadU(kFloats, columns_ + column_);
      column_ += hn::Lanes(kFloats);
      return;
    }
    HWY_ALIGN float scales[hn::MaxLanes(kFloats)];
    HWY_ALIGN float columns[hn::MaxLanes(kFloats)];
    for (size_t i = 0; i < hn::Lanes(kFloats); ++i) {  // over the row's end
      if (column_ == column_count_) next_row();
      scales[i] = scale_;
      columns[i] = columns_[column_++];
    }
    scale = hn::Load(kFloats, scales);
    column = hn::Load(kFloats, columns);
  }

 private:
  HWY_INLINE void next_row() {
    ++row_;
    column_ = 0;
    scale_row();
  }
  /// The last block of a matrix has zeros after it, which take any scale.
  HWY_INLINE void scale_row() { scale_ = std::sqrt(mean_ / rows_[std::min(row_, row_count_ - 1)]); }

  const float* rows_;
  const float* columns_;
  float mean_, scale_ = 0;
  uint64_t row_count_, column_count_, row_, column_;
};

template <MasterFormat kMaster>
void update_factored(UpdateBlocks a) {
  FactorWalk factors(a);
  const size_t size = a.blocks * kStateBlock;
  for (size_t i = 0; i < size; i += hn::Lanes(kFloats)) {
    prefetch_parameters<kMaster>(a, i);
    FloatVector scale, column;
    factors.next(scale, column);
    auto g = hn::Mul(load_gradient<kMaster>(a, i), hn::Set(kFloats, a.gradient_scale));
    g = hn::Mul(g, scale);
    store_master<kMaster>(normalised(a, load_master<kMaster>(a, i), g, column), a, i);
  }
}

/// rounding_bits of the lanes' parameters; `counter` holds the low word of the key plus index
/// times kIndexStride.
HWY_INLINE WordVector mix(WordVector counter, uint32_t high_key) {
  auto bits = hn::Xor(counter, hn::ShiftRight<16>(counter));
  bits = hn::Xor(hn::Mul(bits, hn::Set(kWords, kMix1)), hn::Set(kWords, high_key));
  bits = hn::Mul(hn::Xor(bits, hn::ShiftRight<15>(bits)), hn::Set(kWords, kMix2));
  return hn::Xor(bits, hn::ShiftRight<16>(bits));
}
HWY_INLINE WordVector first_counter(uint64_t key) {
  const auto strides = hn::Mul(hn::Iota(kWords, 0), hn::Set(kWords, kIndexStride));
  return hn::Add(strides, hn::Set(kWords, static_cast<uint32_t>(key)));
}
HWY_INLINE WordVector next_counter(WordVector counter) {
  const auto lanes = static_cast<uint32_t>(hn::Lanes(kWords));
  return hn::Add(counter, hn::Set(kWords, lanes * kIndexStride));
}
HWY_INLINE WordVector low_half(WordVector bits) { return hn::And(bits, hn::Set(kWords, 0xffffu)); }

template <OptimizerKind kKind, MasterFormat kMaster>
void update_bf16(UpdateBlocks a) {
  constexpr bool kSecond = Has<kKind, true>::second;
  for (size_t block = 0; block < a.blocks; ++block) {
    const uint64_t key = block_rounding_key(a.step_key, a.layer, a.first_block + block);
    auto counter = first_counter(key);
    const size_t end = (block + 1) * kStateBlock;
    for (size_t i = end - kStateBlock; i < end; i += hn::Lanes(kFloats)) {
      prefetch_parameters<kMaster>(a, i);
      prefetch(a.first, i, 2);
      if constexpr (kSecond) prefetch(a.second, i, 2);
      auto m = load_bf16(a.first, i), v = hn::Zero(kFloats);
      if constexpr (kSecond) v = load_bf16(a.second, i);
      const auto p =
          update<kKind, true>(a, load_master<kMaster>(a, i), load_gradient<kMaster>(a, i), m, v);
      const auto random = mix(counter, static_cast<uint32_t>(key >> 32));
      counter = next_counter(counter);
      store_master<kMaster>(p, a, i);
      const auto first = hn::Add(hn::BitCast(kWords, m), low_half(random));
      store_halves(hn::ShiftRight<16>(first), a.first, i);
      if constexpr (kSecond) {
        const auto second = hn::Add(hn::BitCast(kWords, v), hn::ShiftRight<16>(random));
        store_halves(hn::ShiftRight<16>(second), a.second, i);
      }
    }
  }
}

/// decode_level, encode_level and what follows them in moment_formats.h.
HWY_INLINE FloatVector decode(WordVector shifted_code, float top_inverse, float scale) {
  const auto bits = hn::Add(shifted_code, hn::Set(kWords, kTwoBits));
  const auto level = hn::Sub(hn::BitCast(kFloats, bits), hn::Set(kFloats, 2.0f));
  return hn::Mul(hn::Mul(level, hn::Set(kFloats, top_inverse)), hn::Set(kFloats, scale));
}
HWY_INLINE WordVector encode(FloatVector magnitude, float factor, WordVector noise) {
  const auto level = hn::Add(hn::Mul(magnitude, hn::Set(kFloats, factor)), hn::Set(kFloats, 2.0f));
  return hn::ShiftRight<kLevelShift>(hn::Add(hn::BitCast(kWords, level), noise));
}

HWY_INLINE FloatVector load_first(const std::byte* codes, size_t i, float scale) {
  const hn::RebindToSigned<FloatTag> integers;
  const hn::Rebind<int8_t, FloatTag> bytes;
  const auto code =
      hn::BitCast(kWords, hn::PromoteTo(integers, hn::LoadU(bytes, as<int8_t>(codes) + i)));
  const auto shifted =
      hn::And(hn::ShiftLeft<kLevelShift>(code), hn::Set(kWords, 0x7fu << kLevelShift));
  return hn::CopySign(decode(shifted, kFirstTopInverse, scale), hn::BitCast(kFloats, code));
}
HWY_INLINE FloatVector load_second(const std::byte* codes, size_t i, float scale) {
  return decode(hn::ShiftLeft<kLevelShift>(load_bytes(codes, i)), kSecondTopInverse, scale);
}

HWY_INLINE WordVector encode_first(FloatVector m, float factor, WordVector random) {
  const auto noise = hn::And(random, hn::Set(kWords, kNoiseMask));
  const auto sign = hn::ShiftRight<24>(hn::BitCast(kWords, m));
  return hn::OrAnd(encode(hn::Abs(m), factor, noise), sign, hn::Set(kWords, 0x80u));
}
HWY_INLINE WordVector encode_second(FloatVector v, float factor, WordVector random) {
  const auto noise = hn::And(hn::ShiftRight<kNoiseShift>(random), hn::Set(kWords, kNoiseMask));
  const auto positive = hn::RebindMask(kWords, hn::Gt(v, hn::Zero(kFloats)));
  const auto least = hn::IfThenElseZero(positive, hn::Set(kWords, 0x401u));
  return hn::Max(encode(v, factor, noise), least);
}

/// Codes a block from its moments; the random bits are those of the block's key.
template <bool kSecond>
HWY_INLINE void encode_block(const UpdateBlocks& a, size_t block, uint64_t key, const float* first,
                             const float* second, float first_scale, float second_scale) {
  const float first_factor = level_factor(first_scale, kFirstTop);
  const float second_factor = level_factor(second_scale, kSecondTop);
  a.first_scales[block] = first_scale;
  if constexpr (kSecond) a.second_scales[block] = second_scale;
  auto counter = first_counter(key);
  const size_t begin = block * kStateBlock;
  for (size_t i = 0; i < kStateBlock; i += hn::Lanes(kFloats)) {
    prefetch(a.first, begin + i, 1);
    if constexpr (kSecond) prefetch(a.second, begin + i, 1);
    const auto random = mix(counter, static_cast<uint32_t>(key >> 32));
    counter = next_counter(counter);
    const auto m = hn::Load(kFloats, first + i);
    store_bytes(encode_first(m, first_factor, random), a.first, begin + i);
    if constexpr (kSecond) {
      const auto v = hn::Load(kFloats, second + i);
      store_bytes(encode_second(v, second_factor, random), a.second, begin + i);
    }
  }
}

template <OptimizerKind kKind, MasterFormat kMaster>
void update_int8(UpdateBlocks a) {
  constexpr bool kSecond = Has<kKind, true>::second;
  HWY_ALIGN float first[kStateBlock];
  HWY_ALIGN float second[kSecond ? kStateBlock : 1];
  for (size_t block = 0; block < a.blocks; ++block) {
    const size_t begin = block * kStateBlock;
    const float first_scale = a.first_scales[block];
    float second_scale = 0;
    if constexpr (kSecond) second_scale = a.second_scales[block];
    auto largest_first = hn::Zero(kFloats), largest_second = hn::Zero(kFloats);
    for (size_t i = 0; i < kStateBlock; i += hn::Lanes(kFloats)) {
      prefetch_parameters<kMaster>(a, begin + i);
      auto m = load_first(a.first, begin + i, first_scale), v = hn::Zero(kFloats);
      if constexpr (kSecond) {
        v = load_second(a.second, begin + i, second_scale);
      }
      const auto p = update<kKind, true>(a, load_master<kMaster>(a, begin + i),
                                         load_gradient<kMaster>(a, begin + i), m, v);
      store_master<kMaster>(p, a, begin + i);
      hn::Store(m, kFloats, first + i);
      largest_first = hn::Max(largest_first, hn::Abs(m));
      if constexpr (kSecond) {
        hn::Store(v, kFloats, second + i);
        largest_second = hn::Max(largest_second, v);
      }
    }
    const uint64_t key = block_rounding_key(a.step_key, a.layer, a.first_block + block);
    encode_block<kSecond>(a, block, key, first, second,
                          block_scale(hn::GetLane(hn::MaxOfLanes(kFloats, largest_first))),
                          block_scale(hn::GetLane(hn::MaxOfLanes(kFloats, largest_second))));
  }
}

template <OptimizerKind kKind, MasterFormat kMaster>
void update_state(const UpdateBlocks& a) {
  switch (a.state) {
    case StateFormat::float32: return update_float32<kKind, kMaster, true>(a);
    case StateFormat::bfloat16: return update_bf16<kKind, kMaster>(a);
    case StateFormat::int8: return update_int8<kKind, kMaster>(a);
  }
}

template <MasterFormat kMaster>
void update_kind(const UpdateBlocks& a) {
  switch (a.kind) {
    case OptimizerKind::adamw: return update_state<OptimizerKind::adamw, kMaster>(a);
    case OptimizerKind::lion: return update_state<OptimizerKind::lion, kMaster>(a);
    case OptimizerKind::sgd:
      if (a.momentum) return update_state<OptimizerKind::sgd, kMaster>(a);
      return update_float32<OptimizerKind::sgd, kMaster, false>(a);
    case OptimizerKind::adafactor:
      if (a.matrix.rows > 0) return update_factored<kMaster>(a);
      return update_float32<OptimizerKind::adafactor, kMaster, false>(a);
  }
}

void update_master(const UpdateBlocks& a) {
  if (a.master == MasterFormat::split) return update_kind<MasterFormat::split>(a);
  update_kind<MasterFormat::float32>(a);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace overspill
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace overspill {

HWY_EXPORT(update_master);

void update_blocks(const UpdateBlocks& blocks) { HWY_DYNAMIC_DISPATCH(update_master)(blocks); }

std::vector<int64_t> update_targets() {
  int64_t left = (hwy::SupportedTargets() & HWY_TARGETS) | HWY_STATIC_TARGET;
  std::vector<int64_t> targets;
  for (; left != 0; left &= left - 1) targets.push_back(left & -left);
  return targets;
}

const char* update_target_name(int64_t target) { return hwy::TargetName(target); }

void force_update_target(int64_t target) { hwy::SetSupportedTargetsForTest(target); }

}  // namespace overspill
#endif
