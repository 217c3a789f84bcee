// Embedding lookup and its gradient. Rows of one token are summed in row order by one block, found
// through a chain that a first kernel makes: no atomics, and the bits do not depend on the
// schedule.
#include "engine/base/cuda_vector.h"
#include "engine/model/cuda_kernels.h"

namespace overspill::cuda {
namespace {

constexpr int kThreads = 128;

template <int kWidth, class T>
__global__ void __launch_bounds__(kThreads)
    copy_rows(const int32_t* tokens, const T* table, T* y, uint64_t d) {
  const T* from = table + static_cast<uint64_t>(tokens[blockIdx.x]) * d;
  T* to = y + blockIdx.x * d;
  for (uint64_t i = threadIdx.x * kWidth; i < d; i += kThreads * kWidth) {
    float value[kWidth];
    load<kWidth>(from + i, value);
    store<kWidth>(value, to + i);
  }
}

/// A chain's links: the next row of the token in the low 31 bits, `rows` after the last; the top
/// bit where an earlier row has the token.
constexpr uint32_t kHasEarlier = 0x80000000u;

/// A warp is a row.
__global__ void __launch_bounds__(kThreads)
    link_rows(const int32_t* tokens, uint32_t* links, uint32_t rows) {
  const uint32_t row = blockIdx.x * (kThreads / kWarp) + threadIdx.x / kWarp;
  if (row >= rows) return;
  const uint32_t lane = threadIdx.x % kWarp;
  const int32_t token = tokens[row];
  uint32_t next = rows;
  for (uint32_t first = row + 1; first < rows && next == rows; first += kWarp) {
    const uint32_t other = first + lane;
    const uint32_t same = ballot(other < rows && tokens[other] == token);
    if (same != 0) next = first + static_cast<uint32_t>(lowest_bit(same));
  }
  bool earlier = false;
  for (uint32_t end = row; end > 0 && !earlier; end = end > kWarp ? end - kWarp : 0) {
    earlier = ballot(lane < end && tokens[end - 1 - lane] == token) != 0;
  }
  if (lane == 0) links[row] = next | (earlier ? kHasEarlier : 0);
}

/// A block is some columns of a chain, at its first row.
template <int kWidth, class T>
__global__ void __launch_bounds__(kThreads)
    sum_chains(const int32_t* tokens, const uint32_t* links, const T* dy, float* dtable,
               uint32_t rows, uint64_t d) {
  const uint32_t first = blockIdx.x;
  const uint64_t i = (uint64_t{blockIdx.y} * kThreads + threadIdx.x) * kWidth;
  if ((links[first] & kHasEarlier) != 0 || i >= d) return;
  float* const target = dtable + static_cast<uint64_t>(tokens[first]) * d + i;
  float sum[kWidth];
  load<kWidth>(target, sum);
  for (uint32_t row = first; row < rows; row = links[row] & ~kHasEarlier) {
    float value[kWidth];
    load<kWidth>(dy + row * d + i, value);
    for (int j = 0; j < kWidth; ++j) sum[j] += value[j];
  }
  store<kWidth>(sum, target);
}

}  // namespace

template <class T>
void embed(cudaStream_t stream, const int32_t* tokens, const T* table, T* y, uint64_t rows,
           uint64_t d) {
  if (d % kPack == 0 && aligned(table, y)) {
    OVERSPILL_LAUNCH((copy_rows<kPack, T>), blocks_x(rows), kThreads, 0, stream, tokens, table, y,
                     d);
  } else {
    OVERSPILL_LAUNCH((copy_rows<1, T>), blocks_x(rows), kThreads, 0, stream, tokens, table, y, d);
  }
}

template <class T>
void embed_gradient(cudaStream_t stream, const int32_t* tokens, const T* dy, float* dtable,
                    void* workspace, uint64_t rows, uint64_t d) {
  auto* links = static_cast<uint32_t*>(workspace);
  const auto count = static_cast<uint32_t>(rows);  // a grid has fewer blocks than 2^31
  OVERSPILL_LAUNCH(link_rows, blocks_x(ceil_div(rows, kThreads / kWarp)), kThreads, 0, stream,
                   tokens, links, count);
  const bool vector = d % kPack == 0 && aligned(dy, dtable);
  const uint64_t columns = uint64_t{kThreads} * (vector ? kPack : 1);
  const dim3 grid = blocks_x(rows, static_cast<unsigned>(ceil_div(d, columns)));
  if (vector) {
    OVERSPILL_LAUNCH((sum_chains<kPack, T>), grid, kThreads, 0, stream, tokens, links, dy, dtable,
                     count, d);
  } else {
    OVERSPILL_LAUNCH((sum_chains<1, T>), grid, kThreads, 0, stream, tokens, links, dy, dtable,
                     count, d);
  }
}

#define INSTANTIATE(T)                                                                          \
  template void embed(cudaStream_t, const int32_t*, const T*, T*, uint64_t, uint64_t);          \
  template void embed_gradient(cudaStream_t, const int32_t*, const T*, float*, void*, uint64_t, \
                               uint64_t);
INSTANTIATE(float)
INSTANTIATE(bf16)

}  // namespace overspill::cuda
