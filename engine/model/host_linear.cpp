// Matrix products of the host device: single-threaded BLAS calls inside the pool's tasks. bf16
// weights are widened panel by panel into a buffer that stays in the cache.
#include <algorithm>

#include "engine/base/error.h"
#include "engine/base/parallel.h"
#include "engine/base/simd.h"
#include "engine/base/units.h"
#include "engine/model/blas.h"
#include "engine/model/host_kernels.h"

namespace overspill::host {
namespace {

constexpr uint64_t kRowBlock = 512;   // tokens per task
constexpr uint64_t kPanelRows = 256;  // of a widened panel; 256 * 1024 floats are 1 MiB
constexpr uint64_t kPanelColumns = 1024;
static_assert(kPanelRows * kPanelColumns * sizeof(float) <= kThreadScratchBytes);

OVERSPILL_SIMD void widen_row(const uint16_t* src, float* dst, uint64_t size) {
  for (uint64_t i = 0; i < size; ++i) dst[i] = bf16_to_float(src[i]);
}

/// W[row0 : row0+rows, col0 : col0+cols] as float32: in place when it is, else in the panel.
struct Panel {
  const float* values;
  uint64_t stride;
};
Panel panel(WeightView w, uint64_t columns, uint64_t row0, uint64_t rows, uint64_t col0,
            uint64_t cols, float* buffer) {
  if (w.type == DType::f32) {
    return {static_cast<const float*>(w.values) + row0 * columns + col0, columns};
  }
  const auto* source = static_cast<const uint16_t*>(w.values) + row0 * columns + col0;
  for (uint64_t r = 0; r < rows; ++r) widen_row(source + r * columns, buffer + r * cols, cols);
  return {buffer, cols};
}

float* thread_buffer(const KernelScratch& scratch) {
  return reinterpret_cast<float*>(scratch.memory + parallel_slot() * kThreadScratchBytes);
}

/// Columns of the result per task: enough tasks to share, large enough for BLAS.
uint64_t column_block(uint64_t columns) {
  return std::clamp<uint64_t>(round_up(ceil_div(columns, 8), 32), 32, kPanelRows);
}

}  // namespace

void linear(const KernelScratch& scratch, const LinearShape& s, const float* x, WeightView w,
            float* y, bool accumulate) {
  const uint64_t block = column_block(s.out), blocks = ceil_div(s.out, block);
  parallel_for(blocks * ceil_div(s.rows, kRowBlock), [&](uint64_t task) {
    const uint64_t out0 = task % blocks * block, outs = std::min(block, s.out - out0);
    const uint64_t row0 = task / blocks * kRowBlock, rows = std::min(kRowBlock, s.rows - row0);
    const uint64_t depth = w.type == DType::f32 ? s.in : kPanelColumns;
    for (uint64_t in0 = 0; in0 < s.in; in0 += depth) {
      const uint64_t ins = std::min(depth, s.in - in0);
      const Panel p = panel(w, s.in, out0, outs, in0, ins, thread_buffer(scratch));
      gemm(CblasNoTrans, CblasTrans, rows, outs, ins, 1.0f, x + row0 * s.in + in0, s.in, p.values,
           p.stride, accumulate || in0 > 0 ? 1.0f : 0.0f, y + row0 * s.out + out0, s.out);
    }
  });
}

void linear_input_gradient(const KernelScratch& scratch, const LinearShape& s, const float* dy,
                           WeightView w, float* dx, bool accumulate) {
  const uint64_t block = column_block(s.in), blocks = ceil_div(s.in, block);
  parallel_for(blocks * ceil_div(s.rows, kRowBlock), [&](uint64_t task) {
    const uint64_t in0 = task % blocks * block, ins = std::min(block, s.in - in0);
    const uint64_t row0 = task / blocks * kRowBlock, rows = std::min(kRowBlock, s.rows - row0);
    const uint64_t depth = w.type == DType::f32 ? s.out : kPanelColumns;
    for (uint64_t out0 = 0; out0 < s.out; out0 += depth) {
      const uint64_t outs = std::min(depth, s.out - out0);
      const Panel p = panel(w, s.in, out0, outs, in0, ins, thread_buffer(scratch));
      gemm(CblasNoTrans, CblasNoTrans, rows, ins, outs, 1.0f, dy + row0 * s.out + out0, s.out,
           p.values, p.stride, accumulate || out0 > 0 ? 1.0f : 0.0f, dx + row0 * s.in + in0, s.in);
    }
  });
}

void linear_weight_gradient(const LinearShape& s, const float* dy, const float* x, float* dw,
                            bool accumulate) {
  constexpr uint64_t kInBlock = 2048;
  const uint64_t block = column_block(s.out), blocks = ceil_div(s.out, block);
  parallel_for(blocks * ceil_div(s.in, kInBlock), [&](uint64_t task) {
    const uint64_t out0 = task % blocks * block, outs = std::min(block, s.out - out0);
    const uint64_t in0 = task / blocks * kInBlock, ins = std::min(kInBlock, s.in - in0);
    gemm(CblasTrans, CblasNoTrans, outs, ins, s.rows, 1.0f, dy + out0, s.out, x + in0, s.in,
         accumulate ? 1.0f : 0.0f, dw + out0 * s.in + in0, s.in);
  });
}

}  // namespace overspill::host
