// Collectives of GPU ranks over NCCL. Spans of floats and bytes lie in memory that the GPU reaches,
// spans of doubles in the host's. Calls put their work on one stream and return when it is done, or
// at once where that is deferred; NCCL itself is never waited in, so that a lost rank or abort()
// ends every call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "engine/collective/collective.h"
#include "engine/collective/group.h"

namespace overspill {

/// The stream that a group's work is put on, in order, and what the device must do there besides
/// NCCL's part. Nothing here waits. Used by the thread that calls the collective.
class NcclStream {
 public:
  virtual ~NcclStream() = default;
  /// The cudaStream_t, on the device that is current for the calling thread.
  virtual void* handle() const = 0;
  /// Whether everything put on the stream is done. Throws when the device has failed.
  virtual bool idle() = 0;
  /// Either end is the device's or the host's memory.
  virtual void copy(void* to, const void* from, size_t bytes) = 0;
  /// To nearest, ties to even.
  virtual void round_to_bf16(const float* values, uint16_t* rounded, size_t count) = 0;
  virtual void widen_bf16(const uint16_t* rounded, float* values, size_t count) = 0;
  /// sum[i] = ((c[i] + c[stride + i]) + c[2 * stride + i]) + ... in float32, over `ranks`
  /// contributions of `type`; `sum` overlaps none of them.
  virtual void sum_in_rank_order(ReduceType type, const void* contributions, size_t stride,
                                 uint32_t ranks, float* sum, size_t count) = 0;
};

struct NcclOptions {
  /// Sums in the order of ranks, made of pieces sent to the rank that owns them. Otherwise NCCL's
  /// own reductions: the order is fixed by NCCL's choice of algorithm, and with bf16 partial sums
  /// are rounded at every hop.
  bool deterministic = false;
  /// Collective::on_stream().
  bool deferred = false;
  /// Memory of the device that this group alone uses, nccl_staging_bytes(group.size) of it, aligned
  /// to 16 bytes.
  std::span<std::byte> staging{};
};

uint64_t nccl_staging_bytes(uint32_t ranks);

/// Called on all ranks of the group, for several groups in the same order. bytes_sent() follows the
/// formulas in gloo_collective.h; NCCL's own algorithms may move a little more or less. Throws
/// Error(rank_lost), or what open_nccl_library() throws.
std::unique_ptr<Collective> make_nccl_collective(const CollectiveGroup& group, NcclStream& stream,
                                                 const NcclOptions& options);

}  // namespace overspill
