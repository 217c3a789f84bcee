// Updates with float32 moments and with factored ones, and the runs of a chunk.
#include "optim/cuda_update.h"

#include "engine/base/random.h"
#include "optim/cuda_update_rules.h"

namespace overspill::cuda {
namespace {

template <Rule kRule, MasterFormat kMaster>
struct Update {
  static constexpr bool kFirst = kHasFirst<kRule>, kSecond = kHasSecond<kRule>;
  DeviceRun run;

  template <int kWidth>
  __device__ void at(uint64_t i) const {
    auto* const first = reinterpret_cast<float*>(run.first);
    auto* const second = reinterpret_cast<float*>(run.second);
    float p[kWidth], g[kWidth], m[kWidth] = {}, v[kWidth] = {};
    load_parameters<kMaster>(run, i, p, g);
    if constexpr (kFirst) load<kWidth>(first + i, m);
    if constexpr (kSecond) load<kWidth>(second + i, v);
    for (int j = 0; j < kWidth; ++j) p[j] = next_master<kRule>(run, p[j], g[j], m[j], v[j]);
    store_master<kMaster>(p, run, i);
    if constexpr (kFirst) store<kWidth>(m, first + i);
    if constexpr (kSecond) store<kWidth>(v, second + i);
  }
};

/// Adafactor's factored second moment: averages of the matrix's rows and columns.
struct Factors {
  const float *rows, *columns, *mean;
  uint64_t column_count;
  uint64_t element;  ///< of the matrix: the run's first parameter
};

template <MasterFormat kMaster>
struct FactoredUpdate {
  DeviceRun run;
  Factors factors;

  __device__ float row_scale(uint64_t row) const {
    return exact_sqrt(exact_div(*factors.mean, factors.rows[row]));
  }
  template <int kWidth>
  __device__ void at(uint64_t i) const {
    float p[kWidth], g[kWidth];
    load_parameters<kMaster>(run, i, p, g);
    uint64_t row = (factors.element + i) / factors.column_count;
    uint64_t column = (factors.element + i) % factors.column_count;
    float scale = row_scale(row);
    for (int j = 0; j < kWidth; ++j) {
      if (column == factors.column_count) {
        column = 0;
        scale = row_scale(++row);
      }
      g[j] = exact_mul(exact_mul(g[j], run.gradient_scale), scale);
      p[j] = normalised(run, p[j], g[j], factors.columns[column++]);
    }
    store_master<kMaster>(p, run, i);
  }
};

struct ZeroMoments {
  float* moments;
  template <int kWidth>
  __device__ void at(uint64_t i) const {
    const float zero[kWidth] = {};
    store<kWidth>(zero, moments + i);
  }
};

template <Rule kRule>
void launch_float32(cudaStream_t stream, MasterFormat master, const DeviceRun& run) {
  // Moments of exact runs begin anywhere.
  const bool vector =
      (!kHasFirst<kRule> || aligned(run.first)) && (!kHasSecond<kRule> || aligned(run.second));
  if (master == MasterFormat::split) {
    launch_elementwise(stream, Update<kRule, MasterFormat::split>{run}, 0, run.size, vector);
  } else {
    launch_elementwise(stream, Update<kRule, MasterFormat::float32>{run}, 0, run.size, vector);
  }
}

void launch_float32(cudaStream_t stream, MasterFormat master, Rule rule, const DeviceRun& run) {
  switch (rule) {
    case Rule::adamw: return launch_float32<Rule::adamw>(stream, master, run);
    case Rule::lion: return launch_float32<Rule::lion>(stream, master, run);
    case Rule::sgd: return launch_float32<Rule::sgd>(stream, master, run);
    case Rule::sgd_with_momentum:
      return launch_float32<Rule::sgd_with_momentum>(stream, master, run);
    case Rule::adafactor: return launch_float32<Rule::adafactor>(stream, master, run);
  }
}

void launch_factored(cudaStream_t stream, MasterFormat master, const FactoredMatrix& matrix,
                     const float* averages, uint64_t element, const DeviceRun& run) {
  const Factors factors{averages + matrix.first, averages + matrix.column_first(),
                        averages + matrix.mean(), matrix.columns, element};
  if (master == MasterFormat::split) {
    launch_elementwise(stream, FactoredUpdate<MasterFormat::split>{run, factors}, 0, run.size,
                       true);
  } else {
    launch_elementwise(stream, FactoredUpdate<MasterFormat::float32>{run, factors}, 0, run.size,
                       true);
  }
}

Rule rule_of(const OptimizerSettings& settings) {
  switch (settings.kind) {
    case OptimizerKind::adamw: return Rule::adamw;
    case OptimizerKind::lion: return Rule::lion;
    case OptimizerKind::sgd: return settings.momentum != 0 ? Rule::sgd_with_momentum : Rule::sgd;
    case OptimizerKind::adafactor: break;
  }
  return Rule::adafactor;
}

uint64_t bytes_of(StateFormat moments) {
  switch (moments) {
    case StateFormat::float32: return 4;
    case StateFormat::bfloat16: return 2;
    case StateFormat::int8: break;
  }
  return 1;
}

/// Addresses of arrays that the settings lack are never used.
DeviceRun device_run(const OptimizerSettings& settings, const UpdateStep& step,
                     const UpdateChunk& chunk, const StateLayout& layout, const UpdateRun& run) {
  const UpdateStep::Group& group = step.groups[run.group];
  const float no_decay = settings.kind == OptimizerKind::sgd ? 0.0f : 1.0f;
  const uint64_t width = settings.master == MasterFormat::split ? 2 : 4;
  const uint64_t moment = bytes_of(settings.state), block = run.begin / kStateBlock;
  const uint64_t first = run.exact ? layout.exact_first + run.exact_begin * sizeof(float)
                                   : layout.first + run.begin * moment;
  const uint64_t second = run.exact ? layout.exact_second + run.exact_begin * sizeof(float)
                                    : layout.second + run.begin * moment;
  return {.size = run.end - run.begin,
          .decay = run.decay ? group.decay : no_decay,
          .step_size = group.step_size,
          .gradient_scale = step.gradient_scale,
          .beta1 = step.beta1,
          .beta2 = step.beta2,
          .one_minus_beta1 = step.one_minus_beta1,
          .one_minus_beta2 = step.one_minus_beta2,
          .inverse_sqrt_bias2 = step.inverse_sqrt_bias2,
          .epsilon = step.epsilon,
          .weight = chunk.weight + run.begin * width,
          .remainder = chunk.state + layout.remainder + run.begin * 2,
          .first = chunk.state + first,
          .second = chunk.state + second,
          .gradient = chunk.gradient + run.begin * width,
          .first_scales = reinterpret_cast<float*>(chunk.state + layout.first_scales) + block,
          .second_scales = reinterpret_cast<float*>(chunk.state + layout.second_scales) + block,
          .rounding_key = mix64(random_bits(step.rounding_key, chunk.layer)),
          .first_block = chunk.first / kStateBlock + block};
}

}  // namespace

void update_chunk(cudaStream_t stream, const OptimizerSettings& settings, const UpdateStep& step,
                  const UpdateChunk& chunk, std::span<const UpdateRun> runs, bool moments_zero) {
  const StateLayout layout = state_layout(settings, chunk.parameters, chunk.exact);
  const Rule rule = rule_of(settings);
  if (moments_zero) {  // Zero bits are zero in every format.
    auto* const moments = reinterpret_cast<float*>(chunk.state + layout.first);
    const uint64_t size = (layout.bytes - layout.first) / sizeof(float);
    launch_elementwise(stream, ZeroMoments{moments}, 0, size, true);
  }
  const bool coded =
      settings.state != StateFormat::float32 && rule != Rule::sgd && rule != Rule::adafactor;
  for (const UpdateRun& run : runs) {
    const DeviceRun arrays = device_run(settings, step, chunk, layout, run);
    if (rule == Rule::adafactor && !run.exact) {
      const uint64_t element = chunk.first + run.begin - run.matrix.offset;
      launch_factored(stream, settings.master, run.matrix, chunk.averages, element, arrays);
    } else if (coded && !run.exact) {
      launch_coded_update(stream, settings.state, settings.master, rule, arrays);
    } else {
      launch_float32(stream, settings.master, rule, arrays);
    }
  }
}

}  // namespace overspill::cuda
