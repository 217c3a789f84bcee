// Sums in float64 over whole arrays, rows and columns: partial sums over parts that depend on the
// shape alone, then the parts in order.
#include "engine/base/cuda_vector.h"
#include "engine/model/cuda_kernels.h"

namespace overspill::cuda {
namespace {

constexpr int kThreads = 256;
constexpr uint64_t kMaxParts = 1024;
constexpr uint64_t kLeastPart = 4096;

/// Elements per part, a multiple of a pack.
constexpr uint64_t part_size(uint64_t size) {
  const uint64_t part = ceil_div(ceil_div(size, kMaxParts), kPack) * kPack;
  return part < kLeastPart ? kLeastPart : part;
}

/// partial[block] = the sum of squares of its part.
template <int kWidth, class T>
__global__ void __launch_bounds__(kThreads)
    square_parts(const T* x, uint64_t size, uint64_t part, double* partial) {
  const uint64_t begin = blockIdx.x * part, end = begin + part < size ? begin + part : size;
  double sum = 0;
  for (uint64_t i = begin + threadIdx.x * kWidth; i < end; i += kThreads * kWidth) {
    float value[kWidth];
    if (i + kWidth <= end) {
      load<kWidth>(x + i, value);
    } else {
      for (int j = 0; j < kWidth; ++j) value[j] = i + j < end ? to_float(x[i + j]) : 0.0f;
    }
    for (int j = 0; j < kWidth; ++j) sum += static_cast<double>(value[j]) * value[j];
  }
  sum = block_sum<kThreads>(sum);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

/// One block.
template <class T>
__global__ void __launch_bounds__(kThreads)
    total_of(const T* x, uint64_t size, double* total, bool accumulate) {
  double sum = 0;
  for (uint64_t i = threadIdx.x; i < size; i += kThreads) sum += x[i];
  sum = block_sum<kThreads>(sum);
  if (threadIdx.x == 0) *total = accumulate ? *total + sum : sum;
}

__global__ void __launch_bounds__(kThreads)
    row_squares(const float* x, uint64_t columns, double* row_sums) {
  const float* row = x + blockIdx.x * columns;
  double sum = 0;
  for (uint64_t i = threadIdx.x; i < columns; i += kThreads) {
    sum += static_cast<double>(row[i]) * row[i];
  }
  sum = block_sum<kThreads>(sum);
  if (threadIdx.x == 0) row_sums[blockIdx.x] = sum;
}

constexpr uint64_t kRowParts = 64;
constexpr uint64_t part_rows(uint64_t rows) { return ceil_div(rows, kRowParts); }

/// partial[part, column], a thread per column; blockIdx.y is the part.
__global__ void __launch_bounds__(kThreads)
    column_parts(const float* x, uint64_t rows, uint64_t columns, uint64_t part, double* partial) {
  const uint64_t column = uint64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (column >= columns) return;
  const uint64_t begin = blockIdx.y * part, end = begin + part < rows ? begin + part : rows;
  double sum = 0;
  for (uint64_t r = begin; r < end; ++r) {
    const double value = x[r * columns + column];
    sum += value * value;
  }
  partial[blockIdx.y * columns + column] = sum;
}

__global__ void __launch_bounds__(kThreads)
    column_totals(const double* partial, uint64_t parts, uint64_t columns, double* column_sums) {
  const uint64_t column = uint64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (column >= columns) return;
  double sum = 0;
  for (uint64_t p = 0; p < parts; ++p) sum += partial[p * columns + column];
  column_sums[column] = sum;
}

}  // namespace

void sum(cudaStream_t stream, const float* x, uint64_t size, double* total, bool accumulate) {
  OVERSPILL_LAUNCH(total_of<float>, 1, kThreads, 0, stream, x, size, total, accumulate);
}

uint64_t sum_of_squares_workspace_bytes(uint64_t size) {
  return ceil_div(size, part_size(size)) * sizeof(double);
}

template <class T>
void sum_of_squares(cudaStream_t stream, const T* x, uint64_t size, double* total, bool accumulate,
                    void* workspace) {
  auto* partial = static_cast<double*>(workspace);
  const uint64_t part = part_size(size), parts = ceil_div(size, part);
  if (parts > 0 && aligned(x)) {
    OVERSPILL_LAUNCH((square_parts<kPack, T>), blocks_x(parts), kThreads, 0, stream, x, size, part,
                     partial);
  } else if (parts > 0) {
    OVERSPILL_LAUNCH((square_parts<1, T>), blocks_x(parts), kThreads, 0, stream, x, size, part,
                     partial);
  }
  OVERSPILL_LAUNCH(total_of<double>, 1, kThreads, 0, stream, partial, parts, total, accumulate);
}

uint64_t row_column_squares_workspace_bytes(uint64_t rows, uint64_t columns) {
  return ceil_div(rows, part_rows(rows)) * columns * sizeof(double);
}

void row_column_squares(cudaStream_t stream, const float* x, uint64_t rows, uint64_t columns,
                        double* row_sums, double* column_sums, void* workspace) {
  auto* partial = static_cast<double*>(workspace);
  const uint64_t part = part_rows(rows), parts = ceil_div(rows, part);
  const uint64_t blocks = ceil_div(columns, kThreads);
  OVERSPILL_LAUNCH(row_squares, blocks_x(rows), kThreads, 0, stream, x, columns, row_sums);
  OVERSPILL_LAUNCH(column_parts, blocks_x(blocks, static_cast<unsigned>(parts)), kThreads, 0,
                   stream, x, rows, columns, part, partial);
  OVERSPILL_LAUNCH(column_totals, blocks_x(blocks), kThreads, 0, stream, partial, parts, columns,
                   column_sums);
}

template void sum_of_squares(cudaStream_t, const float*, uint64_t, double*, bool, void*);
template void sum_of_squares(cudaStream_t, const bf16*, uint64_t, double*, bool, void*);

}  // namespace overspill::cuda
