// Norms, rotary embedding, SwiGLU, token embedding, loss and reductions of the host device.
#include <algorithm>
#include <cmath>
#include <vector>

#include "engine/base/error.h"
#include "engine/base/parallel.h"
#include "engine/base/simd.h"
#include "engine/base/units.h"
#include "engine/model/fast_math.h"
#include "engine/model/host_kernels.h"

namespace overspill::host {
namespace {

constexpr uint64_t kRowsPerTask = 8;
constexpr uint64_t kElementsPerTask = 1 << 16;

float weight_at(WeightView w, uint64_t i) {
  return w.type == DType::f32 ? static_cast<const float*>(w.values)[i]
                              : bf16_to_float(static_cast<const uint16_t*>(w.values)[i]);
}

/// sum(a*b*w) in 16 lanes; `w` as float.
template <class Weight>
[[gnu::always_inline]] inline float weighted_dot(const float* a, const float* b, const Weight& w,
                                                 uint64_t size) {
  float lanes[kSumLanes] = {};
  uint64_t i = 0;
  for (; i + kSumLanes <= size; i += kSumLanes) {
    for (uint64_t j = 0; j < kSumLanes; ++j) lanes[j] += a[i + j] * b[i + j] * w(i + j);
  }
  for (; i < size; ++i) lanes[0] += a[i] * b[i] * w(i);
  float sum = 0;
  for (uint64_t j = 0; j < kSumLanes; ++j) sum += lanes[j];
  return sum;
}

struct One {
  float operator()(uint64_t) const { return 1.0f; }
};
struct F32Weight {
  const float* values;
  float operator()(uint64_t i) const { return values[i]; }
};
struct Bf16Weight {
  const uint16_t* values;
  float operator()(uint64_t i) const { return bf16_to_float(values[i]); }
};

template <class Weight>
[[gnu::always_inline]] inline void norm_row(const float* x, const Weight& w, float rstd, float* y,
                                            uint64_t d) {
  for (uint64_t i = 0; i < d; ++i) y[i] = x[i] * rstd * w(i);
}
template <class Weight>
[[gnu::always_inline]] inline void norm_gradient_row(const float* x, const Weight& w, float rstd,
                                                     const float* dy, float* dx, uint64_t d) {
  const float c = weighted_dot(dy, x, w, d) * rstd * rstd * rstd / static_cast<float>(d);
  for (uint64_t i = 0; i < d; ++i) dx[i] += rstd * w(i) * dy[i] - c * x[i];
}

OVERSPILL_SIMD void norm_row_f32(const float* x, const float* w, float eps, float* y, float* rstd,
                                 uint64_t d) {
  *rstd = 1.0f / std::sqrt(weighted_dot(x, x, One{}, d) / static_cast<float>(d) + eps);
  norm_row(x, F32Weight{w}, *rstd, y, d);
}
OVERSPILL_SIMD void norm_row_bf16(const float* x, const uint16_t* w, float eps, float* y,
                                  float* rstd, uint64_t d) {
  *rstd = 1.0f / std::sqrt(weighted_dot(x, x, One{}, d) / static_cast<float>(d) + eps);
  norm_row(x, Bf16Weight{w}, *rstd, y, d);
}
OVERSPILL_SIMD void norm_gradient_f32(const float* x, const float* w, float rstd, const float* dy,
                                      float* dx, uint64_t d) {
  norm_gradient_row(x, F32Weight{w}, rstd, dy, dx, d);
}
OVERSPILL_SIMD void norm_gradient_bf16(const float* x, const uint16_t* w, float rstd,
                                       const float* dy, float* dx, uint64_t d) {
  norm_gradient_row(x, Bf16Weight{w}, rstd, dy, dx, d);
}

OVERSPILL_SIMD void weight_gradient_columns(const float* x, const float* rstd, const float* dy,
                                            float* dw, uint64_t rows, uint64_t d, uint64_t begin,
                                            uint64_t end) {
  for (uint64_t r = 0; r < rows; ++r) {
    for (uint64_t i = begin; i < end; ++i) dw[i] += dy[r * d + i] * x[r * d + i] * rstd[r];
  }
}

OVERSPILL_SIMD void add_row(const float* x, float* y, uint64_t size) {
  for (uint64_t i = 0; i < size; ++i) y[i] += x[i];
}

OVERSPILL_SIMD void rotate_head(float* x, const float* cos, const float* sin, uint64_t half,
                                float sign) {
  for (uint64_t j = 0; j < half; ++j) {
    const float a = x[j], b = x[j + half], s = sign * sin[j];
    x[j] = a * cos[j] - b * s;
    x[j + half] = b * cos[j] + a * s;
  }
}

OVERSPILL_SIMD void swiglu_range(const float* gate, const float* up, float* y, uint64_t size) {
  for (uint64_t i = 0; i < size; ++i) y[i] = gate[i] / (1.0f + exp_fast(-gate[i])) * up[i];
}

OVERSPILL_SIMD void swiglu_gradient_range(float* gate, float* up, const float* dy, uint64_t size) {
  for (uint64_t i = 0; i < size; ++i) {
    const float g = gate[i], u = up[i], sigmoid = 1.0f / (1.0f + exp_fast(-g));
    gate[i] = dy[i] * u * sigmoid * (1.0f + g * (1.0f - sigmoid));
    up[i] = dy[i] * g * sigmoid;
  }
}

OVERSPILL_SIMD float exp_sum(const float* x, uint64_t size, float* maximum) {
  float lanes[kSumLanes];
  for (uint64_t j = 0; j < kSumLanes; ++j) lanes[j] = -INFINITY;
  uint64_t i = 0;
  for (; i + kSumLanes <= size; i += kSumLanes) {
    for (uint64_t j = 0; j < kSumLanes; ++j) lanes[j] = lanes[j] < x[i + j] ? x[i + j] : lanes[j];
  }
  for (; i < size; ++i) lanes[0] = lanes[0] < x[i] ? x[i] : lanes[0];
  float best = lanes[0];
  for (uint64_t j = 1; j < kSumLanes; ++j) best = best < lanes[j] ? lanes[j] : best;
  for (uint64_t j = 0; j < kSumLanes; ++j) lanes[j] = 0;
  for (i = 0; i + kSumLanes <= size; i += kSumLanes) {
    for (uint64_t j = 0; j < kSumLanes; ++j) lanes[j] += exp_fast(x[i + j] - best);
  }
  for (; i < size; ++i) lanes[0] += exp_fast(x[i] - best);
  float sum = 0;
  for (uint64_t j = 0; j < kSumLanes; ++j) sum += lanes[j];
  *maximum = best;
  return sum;
}

OVERSPILL_SIMD void softmax_row(float* x, uint64_t size, float shift, float factor) {
  for (uint64_t i = 0; i < size; ++i) x[i] = exp_fast(x[i] - shift) * factor;
}

OVERSPILL_SIMD double square_sum(const float* x, uint64_t size) {
  double lanes[kSumLanes] = {};
  uint64_t i = 0;
  for (; i + kSumLanes <= size; i += kSumLanes) {
    for (uint64_t j = 0; j < kSumLanes; ++j) {
      const double value = x[i + j];
      lanes[j] += value * value;
    }
  }
  for (; i < size; ++i) lanes[0] += static_cast<double>(x[i]) * x[i];
  double sum = 0;
  for (uint64_t j = 0; j < kSumLanes; ++j) sum += lanes[j];
  return sum;
}

/// The squares of a row, added to the columns' sums; returns their own sum.
OVERSPILL_SIMD double add_row_squares(const float* x, uint64_t size, double* column_sums) {
  double lanes[kSumLanes] = {};
  uint64_t i = 0;
  for (; i + kSumLanes <= size; i += kSumLanes) {
    for (uint64_t j = 0; j < kSumLanes; ++j) {
      const double square = static_cast<double>(x[i + j]) * x[i + j];
      lanes[j] += square;
      column_sums[i + j] += square;
    }
  }
  for (; i < size; ++i) {
    const double square = static_cast<double>(x[i]) * x[i];
    lanes[0] += square;
    column_sums[i] += square;
  }
  double sum = 0;
  for (uint64_t j = 0; j < kSumLanes; ++j) sum += lanes[j];
  return sum;
}

OVERSPILL_SIMD void narrow(const float* src, uint16_t* dst, uint64_t size) {
  for (uint64_t i = 0; i < size; ++i) dst[i] = overspill::float_to_bf16(src[i]);
}

}  // namespace

void embed(const int32_t* tokens, WeightView table, float* y, uint64_t rows, uint64_t d) {
  parallel_for(rows, [&](uint64_t r) {
    const uint64_t first = static_cast<uint64_t>(tokens[r]) * d;
    for (uint64_t i = 0; i < d; ++i) y[r * d + i] = weight_at(table, first + i);
  });
}

void embed_gradient(const int32_t* tokens, const float* dy, float* dtable, uint64_t rows,
                    uint64_t d) {
  parallel_blocks(d, 64, [&](uint64_t begin, uint64_t end) {
    for (uint64_t r = 0; r < rows; ++r) {
      const uint64_t first = static_cast<uint64_t>(tokens[r]) * d;
      add_row(dy + r * d + begin, dtable + first + begin, end - begin);
    }
  });
}

void rms_norm(const float* x, WeightView w, float eps, float* y, float* rstd, uint64_t rows,
              uint64_t d) {
  parallel_blocks(rows, kRowsPerTask, [&](uint64_t begin, uint64_t end) {
    for (uint64_t r = begin; r < end; ++r) {
      if (w.type == DType::f32) {
        norm_row_f32(x + r * d, static_cast<const float*>(w.values), eps, y + r * d, rstd + r, d);
      } else {
        norm_row_bf16(x + r * d, static_cast<const uint16_t*>(w.values), eps, y + r * d, rstd + r,
                      d);
      }
    }
  });
}

void rms_norm_gradient(const float* x, WeightView w, const float* rstd, const float* dy, float* dx,
                       float* dw, bool accumulate_dw, uint64_t rows, uint64_t d) {
  if (dw != nullptr) {
    parallel_blocks(d, 256, [&](uint64_t begin, uint64_t end) {
      if (!accumulate_dw) std::fill(dw + begin, dw + end, 0.0f);
      weight_gradient_columns(x, rstd, dy, dw, rows, d, begin, end);
    });
  }
  parallel_blocks(rows, kRowsPerTask, [&](uint64_t begin, uint64_t end) {
    for (uint64_t r = begin; r < end; ++r) {
      if (w.type == DType::f32) {
        norm_gradient_f32(x + r * d, static_cast<const float*>(w.values), rstd[r], dy + r * d,
                          dx + r * d, d);
      } else {
        norm_gradient_bf16(x + r * d, static_cast<const uint16_t*>(w.values), rstd[r], dy + r * d,
                           dx + r * d, d);
      }
    }
  });
}

void rotate(float* x, const float* table, uint64_t batch, uint64_t sequence_len, uint64_t heads,
            uint64_t head_dim, bool inverse) {
  const uint64_t half = head_dim / 2;
  parallel_blocks(batch * sequence_len, kRowsPerTask, [&](uint64_t begin, uint64_t end) {
    for (uint64_t r = begin; r < end; ++r) {
      const float* cos = table + r % sequence_len * head_dim;
      for (uint64_t h = 0; h < heads; ++h) {
        rotate_head(x + (r * heads + h) * head_dim, cos, cos + half, half, inverse ? -1.0f : 1.0f);
      }
    }
  });
}

void swiglu(const float* gate, const float* up, float* y, uint64_t size) {
  parallel_blocks(size, kElementsPerTask, [&](uint64_t begin, uint64_t end) {
    swiglu_range(gate + begin, up + begin, y + begin, end - begin);
  });
}

void swiglu_gradient(float* gate, float* up, const float* dy, uint64_t size) {
  parallel_blocks(size, kElementsPerTask, [&](uint64_t begin, uint64_t end) {
    swiglu_gradient_range(gate + begin, up + begin, dy + begin, end - begin);
  });
}

void cross_entropy(float* logits, const int32_t* targets, float scale, float* loss, uint64_t rows,
                   uint64_t vocabulary) {
  parallel_for(rows, [&](uint64_t r) {
    float* row = logits + r * vocabulary;
    if (targets[r] == kNotTrained) {
      loss[r] = 0;
      if (scale != 0.0f) std::fill_n(row, vocabulary, 0.0f);
      return;
    }
    float maximum;
    const float sum = exp_sum(row, vocabulary, &maximum);
    // The difference first: it is exact for near logits, however large both are.
    loss[r] = std::log(sum) + (maximum - row[targets[r]]);
    if (scale == 0.0f) return;
    softmax_row(row, vocabulary, maximum, scale / sum);
    row[targets[r]] -= scale;
  });
}

void add(const float* x, float* y, uint64_t size) {
  parallel_blocks(size, kElementsPerTask, [&](uint64_t begin, uint64_t end) {
    add_row(x + begin, y + begin, end - begin);
  });
}

double sum_of_squares(const float* x, uint64_t size) {
  std::vector<double> partial(ceil_div(size, kElementsPerTask));
  parallel_blocks(size, kElementsPerTask, [&](uint64_t begin, uint64_t end) {
    partial[begin / kElementsPerTask] = square_sum(x + begin, end - begin);
  });
  double sum = 0;
  for (const double value : partial) sum += value;
  return sum;
}

void row_column_squares(const float* x, uint64_t rows, uint64_t columns, double* row_sums,
                        double* column_sums) {
  constexpr uint64_t kParts = 32;  // each with sums of its own over the columns
  const uint64_t part_rows = ceil_div(rows, kParts), parts = ceil_div(rows, part_rows);
  std::vector<double> partial(parts * columns);
  parallel_blocks(rows, part_rows, [&](uint64_t begin, uint64_t end) {
    double* sums = partial.data() + begin / part_rows * columns;
    for (uint64_t r = begin; r < end; ++r) {
      row_sums[r] = add_row_squares(x + r * columns, columns, sums);
    }
  });
  std::fill_n(column_sums, columns, 0.0);
  for (uint64_t p = 0; p < parts; ++p) {
    for (uint64_t c = 0; c < columns; ++c) column_sums[c] += partial[p * columns + c];
  }
}

void float_to_bf16(const float* src, uint16_t* dst, uint64_t size) {
  // In place, a block's result lies over sources of earlier blocks: one thread, ascending.
  if (static_cast<const void*>(src) == static_cast<const void*>(dst)) {
    constexpr uint64_t kBlock = 1024;
    uint16_t block[kBlock];
    for (uint64_t begin = 0; begin < size; begin += kBlock) {
      const uint64_t count = std::min(kBlock, size - begin);
      narrow(src + begin, block, count);
      std::copy_n(block, count, dst + begin);
    }
    return;
  }
  parallel_blocks(size, kElementsPerTask, [&](uint64_t begin, uint64_t end) {
    narrow(src + begin, dst + begin, end - begin);
  });
}

}  // namespace overspill::host

namespace overspill {

const Kernels& host_kernels() {
  static const Kernels table = {host::linear,
                                host::linear_input_gradient,
                                host::linear_weight_gradient,
                                host::embed,
                                host::embed_gradient,
                                host::rms_norm,
                                host::rms_norm_gradient,
                                host::rotate,
                                host::attention,
                                host::attention_gradient,
                                host::swiglu,
                                host::swiglu_gradient,
                                host::cross_entropy,
                                host::add,
                                host::sum_of_squares,
                                host::row_column_squares,
                                host::float_to_bf16};
  return table;
}

}  // namespace overspill
