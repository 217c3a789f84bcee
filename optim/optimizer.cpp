// State layout, the scalars of a step, and the cut of a chunk's runs into tasks of whole blocks;
// the arithmetic is in update_kernels.cpp.
#include "optim/optimizer.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "engine/base/error.h"
#include "engine/base/parallel.h"
#include "engine/base/random.h"
#include "optim/update_kernels.h"

namespace overspill {
namespace {

constexpr uint64_t kTask = 1 << 15;  ///< parameters
static_assert(kTask % kStateBlock == 0);

bool has_first(const OptimizerSettings& s) {
  if (s.kind == OptimizerKind::sgd) return s.momentum != 0;
  return s.kind != OptimizerKind::adafactor;
}
bool has_second(const OptimizerSettings& s) { return s.kind == OptimizerKind::adamw; }
bool has_exact_second(const OptimizerSettings& s) {
  return has_second(s) || s.kind == OptimizerKind::adafactor;
}
bool allows_exact(const OptimizerSettings& s) {
  return s.state == StateFormat::int8 || s.kind == OptimizerKind::adafactor;
}

/// Bytes per parameter of each array.
struct Widths {
  uint64_t weight, remainder, first, second;
};
Widths widths_of(const OptimizerSettings& s) {
  const bool split = s.master == MasterFormat::split;
  const uint64_t moment = s.state == StateFormat::float32 ? 4
                          : s.state == StateFormat::int8  ? 1
                                                          : 2;
  return {split ? 2u : 4u, split ? 2u : 0u, has_first(s) ? moment : 0, has_second(s) ? moment : 0};
}

/// The arrays of parameters [begin, ...) of a run.
struct Arrays {
  std::byte *weight, *remainder, *first, *second;
  const std::byte* gradient;
  Widths widths;
};

/// Everything that the tasks of one call share.
struct Call {
  const OptimizerSettings& settings;
  const UpdateStep& step;
  const UpdateChunk& chunk;
  StateLayout layout;
  Widths widths;

  std::byte* state(uint64_t offset) const { return chunk.state + offset; }
};

Arrays arrays_of(const Call& call, const UpdateRun& run, uint64_t begin) {
  const UpdateChunk& c = call.chunk;
  Widths w = call.widths;
  Arrays arrays{c.weight + begin * w.weight,
                call.state(call.layout.remainder) + begin * w.remainder,
                call.state(call.layout.first) + begin * w.first,
                call.state(call.layout.second) + begin * w.second,
                c.gradient + begin * w.weight,
                w};
  if (run.exact) {
    const uint64_t at = (run.exact_begin + begin - run.begin) * sizeof(float);
    arrays.widths.first = has_first(call.settings) ? sizeof(float) : 0;
    arrays.widths.second = has_exact_second(call.settings) ? sizeof(float) : 0;
    arrays.first = call.state(call.layout.exact_first) + at;
    arrays.second = call.state(call.layout.exact_second) + at;
  }
  return arrays;
}

UpdateBlocks blocks_of(const Call& call, const UpdateRun& run, uint64_t begin,
                       const Arrays& arrays) {
  const OptimizerSettings& settings = call.settings;
  const UpdateStep& step = call.step;
  const UpdateStep::Group& group = step.groups[run.group];
  const float no_decay = settings.kind == OptimizerKind::sgd ? 0.0f : 1.0f;
  const uint64_t block = begin / kStateBlock;
  UpdateBlocks blocks{.kind = settings.kind,
                      .state = run.exact ? StateFormat::float32 : settings.state,
                      .master = settings.master,
                      .momentum = has_first(settings),
                      .decay = run.decay ? group.decay : no_decay,
                      .step_size = group.step_size,
                      .gradient_scale = step.gradient_scale,
                      .beta1 = step.beta1,
                      .beta2 = step.beta2,
                      .one_minus_beta1 = step.one_minus_beta1,
                      .one_minus_beta2 = step.one_minus_beta2,
                      .inverse_sqrt_bias2 = step.inverse_sqrt_bias2,
                      .epsilon = step.epsilon,
                      .step_key = step.rounding_key,
                      .layer = call.chunk.layer,
                      .first_block = call.chunk.first / kStateBlock + block,
                      .blocks = 0,
                      .weight = arrays.weight,
                      .remainder = arrays.remainder,
                      .gradient = arrays.gradient,
                      .first = arrays.first,
                      .second = arrays.second,
                      .first_scales = nullptr,
                      .second_scales = nullptr,
                      .averages = call.chunk.averages,
                      .matrix = run.matrix,
                      .element = call.chunk.first + begin - run.matrix.offset};
  if (settings.state == StateFormat::int8) {
    const auto scales = [&](uint64_t offset) {
      return reinterpret_cast<float*>(call.state(offset)) + block;
    };
    blocks.first_scales = scales(call.layout.first_scales);
    blocks.second_scales = scales(call.layout.second_scales);
  }
  return blocks;
}

/// The last, shorter block of a run: updated in a copy whose other parameters are zero.
void update_tail(UpdateBlocks blocks, const Arrays& arrays, uint64_t size) {
  using Copy = std::array<std::byte, kStateBlock * sizeof(float)>;
  alignas(64) Copy weight{}, remainder{}, first{}, second{}, gradient{};
  const Widths& w = arrays.widths;
  const auto copy = [size](std::byte* to, const std::byte* from, uint64_t width) {
    if (width != 0) std::memcpy(to, from, size * width);
  };
  copy(weight.data(), arrays.weight, w.weight);
  copy(remainder.data(), arrays.remainder, w.remainder);
  copy(first.data(), arrays.first, w.first);
  copy(second.data(), arrays.second, w.second);
  copy(gradient.data(), arrays.gradient, w.weight);
  blocks.weight = weight.data();
  blocks.remainder = remainder.data();
  blocks.first = first.data();
  blocks.second = second.data();
  blocks.gradient = gradient.data();
  blocks.blocks = 1;
  update_blocks(blocks);
  copy(arrays.weight, weight.data(), w.weight);
  copy(arrays.remainder, remainder.data(), w.remainder);
  copy(arrays.first, first.data(), w.first);
  copy(arrays.second, second.data(), w.second);
}

/// Parameters [begin, end) of a run, begin at a block.
void update_part(const Call& call, const UpdateRun& run, uint64_t begin, uint64_t end) {
  const uint64_t whole = (end - begin) / kStateBlock;
  if (whole > 0) {
    UpdateBlocks blocks = blocks_of(call, run, begin, arrays_of(call, run, begin));
    blocks.blocks = whole;
    update_blocks(blocks);
  }
  const uint64_t tail = begin + whole * kStateBlock;
  if (tail < end) {
    const Arrays arrays = arrays_of(call, run, tail);
    update_tail(blocks_of(call, run, tail, arrays), arrays, end - tail);
  }
}

/// Zeroes the coded moments of [begin, end), begin and end at blocks. Zero bits are zero in every
/// format.
void zero_moments(const Call& call, uint64_t begin, uint64_t end) {
  const auto zero = [&](uint64_t offset, uint64_t first, uint64_t count, uint64_t width) {
    if (width != 0) std::memset(call.state(offset) + first * width, 0, count * width);
  };
  const Widths& w = call.widths;
  const StateLayout& layout = call.layout;
  zero(layout.first, begin, end - begin, w.first);
  zero(layout.second, begin, end - begin, w.second);
  if (call.settings.state != StateFormat::int8) return;
  const uint64_t block = begin / kStateBlock, blocks = end / kStateBlock - block;
  zero(layout.first_scales, block, blocks, w.first * sizeof(float));
  zero(layout.second_scales, block, blocks, w.second * sizeof(float));
}

void check_runs(const Call& call, std::span<const UpdateRun> runs) {
  CHECK(call.chunk.parameters % kStateBlock == 0 && call.chunk.first % kStateBlock == 0);
  uint64_t at = 0;
  for (const UpdateRun& run : runs) {
    CHECK(run.begin >= at && run.begin % kStateBlock == 0 && run.begin <= run.end);
    CHECK(run.end <= call.chunk.parameters && run.group < call.step.groups.size());
    CHECK(!run.exact || (allows_exact(call.settings) &&
                         run.exact_begin + (run.end - run.begin) <= call.chunk.exact));
    CHECK(call.settings.kind != OptimizerKind::adafactor || run.exact != (run.matrix.rows > 0));
    at = run.end;
  }
}

}  // namespace

StateLayout state_layout(const OptimizerSettings& settings, uint64_t parameters, uint64_t exact) {
  CHECK(parameters % kStateBlock == 0);
  CHECK(exact == 0 || allows_exact(settings));
  const Widths w = widths_of(settings);
  const bool coded = settings.state == StateFormat::int8;
  const uint64_t scales = coded ? parameters / kStateBlock * sizeof(float) : 0;
  const uint64_t exact_bytes = exact * sizeof(float);
  const bool first = w.first != 0, second = w.second != 0;
  StateLayout layout;
  layout.first = parameters * w.remainder;
  layout.second = layout.first + parameters * w.first;
  layout.first_scales = layout.second + parameters * w.second;
  layout.second_scales = layout.first_scales + (first ? scales : 0);
  layout.exact_first = layout.second_scales + (second ? scales : 0);
  layout.exact_second = layout.exact_first + (first ? exact_bytes : 0);
  layout.bytes = layout.exact_second + (has_exact_second(settings) ? exact_bytes : 0);
  return layout;
}

UpdateStep update_step(const OptimizerSettings& settings, std::span<const double> learning_rates,
                       uint64_t step, double gradient_scale) {
  CHECK(step > 0);
  const double t = static_cast<double>(step);
  const bool adamw = settings.kind == OptimizerKind::adamw;
  const bool sgd = settings.kind == OptimizerKind::sgd;
  const bool adafactor = settings.kind == OptimizerKind::adafactor;
  const double fresh = std::pow(t, -settings.adafactor_decay);  // 1 - b
  const double bias1 = adamw ? 1.0 - std::pow(settings.beta1, t) : 1.0;
  const double bias2 = adamw ? 1.0 - std::pow(settings.beta2, t) : 1.0;
  UpdateStep scalars;
  for (const double rate : learning_rates) {
    const double decay = sgd ? settings.weight_decay : 1.0 - rate * settings.weight_decay;
    scalars.groups.push_back({static_cast<float>(decay), static_cast<float>(rate / bias1)});
  }
  const double beta1 = sgd ? settings.momentum : settings.beta1;
  scalars.gradient_scale = static_cast<float>(gradient_scale);
  scalars.beta1 = static_cast<float>(beta1);
  scalars.beta2 = static_cast<float>(adafactor ? 1.0 - fresh : settings.beta2);
  scalars.one_minus_beta1 = static_cast<float>(1.0 - beta1);
  scalars.one_minus_beta2 = static_cast<float>(adafactor ? fresh : 1.0 - settings.beta2);
  scalars.inverse_sqrt_bias2 = static_cast<float>(1.0 / std::sqrt(bias2));
  scalars.epsilon = adafactor ? 1e-30f : static_cast<float>(settings.epsilon);
  scalars.rounding_key = random_bits(settings.seed, step);
  return scalars;
}

void update_chunk(const OptimizerSettings& settings, const UpdateStep& step,
                  const UpdateChunk& chunk, std::span<const UpdateRun> runs, bool moments_zero) {
  const Call call{settings, step, chunk, state_layout(settings, chunk.parameters, chunk.exact),
                  widths_of(settings)};
  check_runs(call, runs);
  const uint64_t exact_bytes = call.layout.bytes - call.layout.exact_first;
  if (moments_zero && exact_bytes != 0) {
    std::memset(call.state(call.layout.exact_first), 0, exact_bytes);
  }
  parallel_blocks(chunk.parameters, kTask, [&](uint64_t begin, uint64_t end) {
    if (moments_zero) zero_moments(call, begin, end);
    for (const UpdateRun& run : runs) {
      const uint64_t from = std::max(begin, run.begin), to = std::min(end, run.end);
      if (from < to) update_part(call, run, from, to);
    }
  });
}

}  // namespace overspill
