// Sums in float64 over whole arrays, rows and columns: partial sums over parts that depend on the
// shape alone, then the parts in order.
#include <algorithm>

#include "engine/base/cuda_vector.h"
#include "engine/model/cuda_kernels.h"
#include "engine/model/fast_math.h"

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

/// Elements [first, last) of a matrix, in memory from `values` on. Sums over them have the host's
/// bits: squares of float32 are exact in float64, fused or not, and the order of additions is that
/// of add_part_squares and of the kernel under it (engine/model/host_elementwise.cpp).
struct MatrixPart {
  const float* values;
  uint64_t first, last, columns;

  __device__ double square(uint64_t element) const {
    const double value = values[element - first];
    return value * value;
  }
};

constexpr uint64_t kRowsPerBlock = kThreads / kSumLanes;

/// A half warp per row, a thread per lane of its sum. Rows outside the part get zero.
__global__ void __launch_bounds__(kThreads)
    row_squares(MatrixPart part, uint64_t rows, double* row_sums) {
  OVERSPILL_SHARED(double, partial, [kRowsPerBlock][kSumLanes]);
  const uint64_t place = threadIdx.x / kSumLanes, lane = threadIdx.x % kSumLanes;
  const uint64_t row = uint64_t{blockIdx.x} * kRowsPerBlock + place;
  const uint64_t row_begin = row * part.columns, row_end = row_begin + part.columns;
  const uint64_t begin = part.first > row_begin ? part.first : row_begin;
  const uint64_t end = part.last < row_end ? part.last : row_end;
  // A torn row has one lane, and so does the end of a whole one.
  const bool torn = begin != row_begin || end != row_end;
  const uint64_t in_turns = torn || row >= rows ? 0 : part.columns / kSumLanes * kSumLanes;
  double sum = 0;
#pragma unroll 8
  for (uint64_t i = lane; i < in_turns; i += kSumLanes) sum += part.square(row_begin + i);
  if (lane == 0 && row < rows) {
#pragma unroll 8
    for (uint64_t i = begin + in_turns; i < end; ++i) sum += part.square(i);
  }
  partial[place][lane] = sum;
  warp_barrier();
  if (lane != 0 || row >= rows) return;
  for (uint64_t i = 1; i < kSumLanes; ++i) sum += partial[place][i];
  row_sums[row] = sum;
}

constexpr uint64_t kMaxRowParts = 32;  ///< of sums over columns

/// partial[part, column], a thread per column; blockIdx.y is the part.
__global__ void __launch_bounds__(kThreads)
    column_parts(MatrixPart matrix, uint64_t row_begin, uint64_t row_end, uint64_t part,
                 double* partial) {
  const uint64_t column = uint64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (column >= matrix.columns) return;
  const uint64_t begin = row_begin + blockIdx.y * part;
  const uint64_t end = begin + part < row_end ? begin + part : row_end;
  double sum = 0;
#pragma unroll 8
  for (uint64_t r = begin; r < end; ++r) sum += matrix.square(r * matrix.columns + column);
  partial[blockIdx.y * matrix.columns + column] = sum;
}

/// The parts, then the torn rows: elements before whole_begin and from whole_end on.
__global__ void __launch_bounds__(kThreads)
    column_totals(MatrixPart matrix, const double* partial, uint64_t parts, uint64_t whole_begin,
                  uint64_t whole_end, double* column_sums) {
  const uint64_t columns = matrix.columns;
  const uint64_t column = uint64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (column >= columns) return;
  double sum = 0;
  for (uint64_t p = 0; p < parts; ++p) sum += partial[p * columns + column];
  const auto add_torn = [&](uint64_t begin, uint64_t end) {
    const uint64_t element = begin / columns * columns + column;
    if (element >= begin && element < end) sum += matrix.square(element);
  };
  add_torn(matrix.first, whole_begin);
  add_torn(whole_end, matrix.last);
  column_sums[column] = sum;
}

void matrix_squares(cudaStream_t stream, const MatrixPart& part, uint64_t rows, double* row_sums,
                    double* column_sums, double* partial) {
  const uint64_t begin = ceil_div(part.first, part.columns);
  const uint64_t end = std::max(begin, part.last / part.columns);
  const uint64_t part_rows = std::max<uint64_t>(1, ceil_div(end - begin, kMaxRowParts));
  const uint64_t parts = ceil_div(end - begin, part_rows);
  const uint64_t blocks = ceil_div(part.columns, kThreads);
  OVERSPILL_LAUNCH(row_squares, blocks_x(ceil_div(rows, kRowsPerBlock)), kThreads, 0, stream, part,
                   rows, row_sums);
  if (parts > 0) {
    OVERSPILL_LAUNCH(column_parts, blocks_x(blocks, static_cast<unsigned>(parts)), kThreads, 0,
                     stream, part, begin, end, part_rows, partial);
  }
  // A part inside one row is all in front.
  const uint64_t whole_begin = std::min(begin * part.columns, part.last);
  const uint64_t whole_end = std::min(end * part.columns, part.last);
  OVERSPILL_LAUNCH(column_totals, blocks_x(blocks), kThreads, 0, stream, part, partial, parts,
                   whole_begin, whole_end, column_sums);
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
  return std::min(rows, kMaxRowParts) * columns * sizeof(double);
}

void row_column_squares(cudaStream_t stream, const float* x, uint64_t rows, uint64_t columns,
                        double* row_sums, double* column_sums, void* workspace) {
  matrix_squares(stream, {x, 0, rows * columns, columns}, rows, row_sums, column_sums,
                 static_cast<double*>(workspace));
}

void add_part_squares(cudaStream_t stream, const float* gradients, uint64_t begin, uint64_t end,
                      const FactoredMatrix& m, double* sums, void* workspace) {
  const uint64_t size = m.rows * m.columns;
  const uint64_t first = std::clamp(begin, m.offset, m.offset + size) - m.offset;
  const uint64_t last = std::clamp(end, m.offset, m.offset + size) - m.offset;
  const float* values = first < last ? gradients + (m.offset + first - begin) : gradients;
  matrix_squares(stream, {values, first, last, m.columns}, m.rows, sums, sums + m.rows,
                 static_cast<double*>(workspace));
}

template void sum_of_squares(cudaStream_t, const float*, uint64_t, double*, bool, void*);
template void sum_of_squares(cudaStream_t, const bf16*, uint64_t, double*, bool, void*);

}  // namespace overspill::cuda
