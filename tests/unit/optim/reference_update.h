// The optimizer update written plainly, one parameter after the other: what update_chunk must equal
// bit for bit on every instruction set. Shares state_layout, update_step and moment_formats.h with
// it, no loop and no arithmetic of the update.
#pragma once

#include <array>
#include <cmath>
#include <cstring>
#include <span>

#include "engine/base/dtype.h"
#include "optim/moment_formats.h"
#include "optim/optimizer.h"
#include "optim/split_master.h"

namespace overspill {

template <class T>
T element(const std::byte* array, uint64_t i) {
  T value;
  std::memcpy(&value, array + i * sizeof(T), sizeof(T));
  return value;
}
template <class T>
void set_element(std::byte* array, uint64_t i, T value) {
  std::memcpy(array + i * sizeof(T), &value, sizeof(T));
}

/// The chunk's arrays as float32 values.
class ReferenceChunk {
 public:
  ReferenceChunk(const OptimizerSettings& settings, const UpdateChunk& chunk)
      : settings_(settings),
        chunk_(chunk),
        layout_(state_layout(settings, chunk.parameters, chunk.exact)) {}

  bool split() const { return settings_.master == MasterFormat::split; }
  bool has_first() const {
    if (settings_.kind == OptimizerKind::sgd) return settings_.momentum != 0;
    return settings_.kind != OptimizerKind::adafactor;
  }
  /// Adafactor's is exact, or in the averages.
  bool has_second() const {
    return settings_.kind == OptimizerKind::adamw || settings_.kind == OptimizerKind::adafactor;
  }

  float master(uint64_t i) const {
    if (!split()) return element<float>(chunk_.weight, i);
    return join_master(element<uint16_t>(chunk_.weight, i),
                       element<int16_t>(chunk_.state + layout_.remainder, i));
  }
  void set_master(uint64_t i, float value) const {
    if (!split()) return set_element(chunk_.weight, i, value);
    const SplitMaster halves = split_master(value);
    set_element(chunk_.weight, i, halves.weight);
    set_element(chunk_.state + layout_.remainder, i, halves.remainder);
  }
  float gradient(uint64_t i) const {
    if (!split()) return element<float>(chunk_.gradient, i);
    return bf16_to_float(element<uint16_t>(chunk_.gradient, i));
  }

  /// Moments of parameter i, as coded.
  float first(uint64_t i) const {
    const std::byte* array = chunk_.state + layout_.first;
    if (settings_.state == StateFormat::float32) return element<float>(array, i);
    if (settings_.state == StateFormat::bfloat16) {
      return bf16_to_float(element<uint16_t>(array, i));
    }
    return decode_first(element<uint8_t>(array, i),
                        element<float>(chunk_.state + layout_.first_scales, i / kStateBlock));
  }
  float second(uint64_t i) const {
    const std::byte* array = chunk_.state + layout_.second;
    if (settings_.state == StateFormat::float32) return element<float>(array, i);
    if (settings_.state == StateFormat::bfloat16) {
      return bf16_to_float(element<uint16_t>(array, i));
    }
    return decode_second(element<uint8_t>(array, i),
                         element<float>(chunk_.state + layout_.second_scales, i / kStateBlock));
  }
  std::byte* exact_first() const { return chunk_.state + layout_.exact_first; }
  std::byte* exact_second() const { return chunk_.state + layout_.exact_second; }

  using Block = std::array<float, kStateBlock>;
  /// Codes the moments of parameters [begin, begin + size) of one block.
  void set_moments(uint64_t step_key, uint64_t begin, uint64_t size, const Block& first,
                   const Block& second) const {
    const uint64_t block = begin / kStateBlock;
    const uint64_t key =
        block_rounding_key(step_key, chunk_.layer, chunk_.first / kStateBlock + block);
    float first_scale = 0, second_scale = 0;
    for (uint64_t i = 0; i < size; ++i) {
      first_scale = std::max(first_scale, std::abs(first[i]));
      second_scale = std::max(second_scale, second[i]);
    }
    first_scale = block_scale(first_scale);
    second_scale = block_scale(second_scale);
    if (settings_.state == StateFormat::int8) {
      if (has_first()) set_element(chunk_.state + layout_.first_scales, block, first_scale);
      if (has_second()) set_element(chunk_.state + layout_.second_scales, block, second_scale);
    }
    for (uint64_t i = 0; i < size; ++i) {
      const uint32_t random = rounding_bits(key, static_cast<uint32_t>(i));
      if (has_first()) set_first(begin + i, first[i], first_scale, random);
      if (has_second()) set_second(begin + i, second[i], second_scale, random);
    }
  }

  void zero_moments() const {
    const std::byte zero{0};
    for (uint64_t i = layout_.first; i < layout_.bytes; ++i) set_element(chunk_.state, i, zero);
  }

 private:
  void set_first(uint64_t i, float value, float scale, uint32_t random) const {
    std::byte* array = chunk_.state + layout_.first;
    switch (settings_.state) {
      case StateFormat::float32: return set_element(array, i, value);
      case StateFormat::bfloat16:
        return set_element(array, i, round_to_bf16(value, random & 0xffffu));
      case StateFormat::int8:
        return set_element(array, i, encode_first(value, level_factor(scale, kFirstTop), random));
    }
  }
  void set_second(uint64_t i, float value, float scale, uint32_t random) const {
    std::byte* array = chunk_.state + layout_.second;
    switch (settings_.state) {
      case StateFormat::float32: return set_element(array, i, value);
      case StateFormat::bfloat16: return set_element(array, i, round_to_bf16(value, random >> 16));
      case StateFormat::int8:
        return set_element(array, i, encode_second(value, level_factor(scale, kSecondTop), random));
    }
  }

  const OptimizerSettings& settings_;
  const UpdateChunk& chunk_;
  StateLayout layout_;
};

/// One parameter: changes the moments and returns the new master. The formulas of optimizer.h.
inline float reference_parameter(const OptimizerSettings& settings, const UpdateStep& s, bool decay,
                                 const UpdateStep::Group& group, float p, float g, float& m,
                                 float& v) {
  g *= s.gradient_scale;
  switch (settings.kind) {
    case OptimizerKind::adamw: {
      if (decay) p *= group.decay;
      m += s.one_minus_beta1 * (g - m);
      v = s.beta2 * v + s.one_minus_beta2 * g * g;
      return p - group.step_size * (m / (std::sqrt(v) * s.inverse_sqrt_bias2 + s.epsilon));
    }
    case OptimizerKind::lion: {
      if (decay) p *= group.decay;
      const float direction = s.beta1 * m + s.one_minus_beta1 * g;
      m = s.beta2 * m + s.one_minus_beta2 * g;
      return direction > 0 ? p - group.step_size : direction < 0 ? p + group.step_size : p;
    }
    case OptimizerKind::sgd: {
      if (decay) g += group.decay * p;
      if (settings.momentum != 0) {
        m = s.beta1 * m + g;
        g = m;
      }
      return p - group.step_size * g;
    }
    case OptimizerKind::adafactor: {
      if (decay) p *= group.decay;
      v = s.beta2 * v + s.one_minus_beta2 * (g * g + s.epsilon);
      return p - group.step_size * (g / std::sqrt(v));
    }
  }
  return p;
}

inline void reference_factored(const ReferenceChunk& c, const UpdateStep& s,
                               const UpdateChunk& chunk, const UpdateRun& run) {
  const FactoredMatrix& m = run.matrix;
  const float* rows = chunk.averages + m.first;
  const float* columns = rows + m.rows;
  const UpdateStep::Group& group = s.groups[run.group];
  for (uint64_t i = run.begin; i < run.end; ++i) {
    const uint64_t at = chunk.first + i - m.offset;
    const float scale = std::sqrt(columns[m.columns] / rows[at / m.columns]);
    const float p = run.decay ? c.master(i) * group.decay : c.master(i);
    const float g = c.gradient(i) * s.gradient_scale * scale;
    c.set_master(i, p - group.step_size * (g / std::sqrt(columns[at % m.columns])));
  }
}

inline void reference_update(const OptimizerSettings& settings, const UpdateStep& step,
                             const UpdateChunk& chunk, std::span<const UpdateRun> runs,
                             bool moments_zero) {
  const ReferenceChunk c(settings, chunk);
  if (moments_zero) c.zero_moments();
  for (const UpdateRun& run : runs) {
    if (run.matrix.rows > 0) {
      reference_factored(c, step, chunk, run);
      continue;
    }
    for (uint64_t begin = run.begin; begin < run.end; begin += kStateBlock) {
      const uint64_t size = std::min(kStateBlock, run.end - begin);
      ReferenceChunk::Block first{}, second{};
      for (uint64_t i = 0; i < size; ++i) {
        const uint64_t exact = run.exact_begin + begin - run.begin + i;
        if (c.has_first()) {
          first[i] = run.exact ? element<float>(c.exact_first(), exact) : c.first(begin + i);
        }
        if (c.has_second()) {
          second[i] = run.exact ? element<float>(c.exact_second(), exact) : c.second(begin + i);
        }
        c.set_master(begin + i, reference_parameter(settings, step, run.decay,
                                                    step.groups[run.group], c.master(begin + i),
                                                    c.gradient(begin + i), first[i], second[i]));
        if (run.exact && c.has_first()) set_element(c.exact_first(), exact, first[i]);
        if (run.exact && c.has_second()) set_element(c.exact_second(), exact, second[i]);
      }
      if (!run.exact) c.set_moments(step.rounding_key, begin, size, first, second);
    }
  }
}

}  // namespace overspill
