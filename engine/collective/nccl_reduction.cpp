// Sums over the ranks that NCCL does not make itself: in rank order, and rounded to bf16 on the
// way. Only put on the stream.
#include "engine/base/error.h"
#include "engine/collective/nccl_communicator.h"

namespace overspill {

/// A group of sends and receives: NCCL starts them together.
template <class F>
void NcclCollective::exchange(F&& sends_and_receives) {
  check("ncclGroupStart", nccl_.group_start());
  int first_error = kNcclSuccess;
  sends_and_receives([&](int result) {
    if (result != kNcclInProgress && first_error == kNcclSuccess) first_error = result;
  });
  const int result = nccl_.group_end();  // also after an error: it belongs to the start
  check("ncclSend", first_error);
  check("ncclGroupEnd", result);
}

/// This rank's part becomes the sum in the order of ranks.
void NcclCollective::reduce(std::span<float> values, ReduceType type) {
  const Partition parts{.total = values.size(), .ranks = size()};
  const bool bf16 = type == ReduceType::bf16;
  for (uint64_t p = 0; p * piece_ < parts.length(0); ++p) {
    const auto length = [&](uint32_t r) { return piece_length(parts.length(r), piece_, p); };
    const auto piece_of = [&](uint32_t r) { return values.data() + parts.begin(r) + p * piece_; };
    const uint64_t own = length(rank());
    for (uint32_t r = 0; bf16 && r < size(); ++r) {
      uint16_t* rounded = r == rank() ? incoming_bf16(r) : outgoing_bf16(r);
      if (length(r) > 0) stream_.round_to_bf16(piece_of(r), rounded, length(r));
    }
    if (!bf16 && own > 0) stream_.copy(incoming(rank()), piece_of(rank()), own * sizeof(float));
    exchange([&](auto&& keep) {
      const int datatype = bf16 ? kNcclBfloat16 : kNcclFloat32;
      for (uint32_t r = 0; r < size(); ++r) {
        if (r == rank()) continue;
        const void* out = bf16 ? static_cast<void*>(outgoing_bf16(r)) : piece_of(r);
        void* in = bf16 ? static_cast<void*>(incoming_bf16(r)) : incoming(r);
        const int peer = static_cast<int>(r);
        if (length(r) > 0) {
          keep(nccl_.send(out, length(r), datatype, peer, comm_, stream_.handle()));
        }
        if (own > 0) keep(nccl_.receive(in, own, datatype, peer, comm_, stream_.handle()));
      }
    });
    if (own > 0) {
      stream_.sum_in_rank_order(type, options_.staging.data(), piece_, size(), piece_of(rank()),
                                own);
    }
  }
}

/// Every rank's part to all others; with bf16 rounded, on the rank that has it too.
void NcclCollective::gather_floats(std::span<float> values, const Partition& parts,
                                   ReduceType type) {
  const bool bf16 = type == ReduceType::bf16;
  for (uint64_t p = 0; p * piece_ < parts.length(0); ++p) {
    const auto length = [&](uint32_t r) { return piece_length(parts.length(r), piece_, p); };
    const auto piece_of = [&](uint32_t r) { return values.data() + parts.begin(r) + p * piece_; };
    const uint64_t own = length(rank());
    uint16_t* const rounded = incoming_bf16(rank());
    if (bf16 && own > 0) stream_.round_to_bf16(piece_of(rank()), rounded, own);
    exchange([&](auto&& keep) {
      const int datatype = bf16 ? kNcclBfloat16 : kNcclFloat32;
      for (uint32_t r = 0; r < size(); ++r) {
        if (r == rank()) continue;
        const void* out = bf16 ? static_cast<void*>(rounded) : piece_of(rank());
        void* in = bf16 ? static_cast<void*>(incoming_bf16(r)) : piece_of(r);
        const int peer = static_cast<int>(r);
        if (own > 0) keep(nccl_.send(out, own, datatype, peer, comm_, stream_.handle()));
        if (length(r) > 0) {
          keep(nccl_.receive(in, length(r), datatype, peer, comm_, stream_.handle()));
        }
      }
    });
    for (uint32_t r = 0; bf16 && r < size(); ++r) {
      if (length(r) > 0) stream_.widen_bf16(incoming_bf16(r), piece_of(r), length(r));
    }
  }
}

void NcclCollective::reduce_scatter_rounded(std::span<float> values, const Partition& parts) {
  uint16_t *const packed = outgoing_bf16(0), *const sum = incoming_bf16(0);
  for (uint64_t p = 0; p * piece_ < parts.length(0); ++p) {
    const uint64_t count = piece_length(parts.length(0), piece_, p);
    const auto piece_of = [&](uint32_t r) { return values.data() + parts.begin(r) + p * piece_; };
    for (uint32_t r = 0; r < size(); ++r) {
      stream_.round_to_bf16(piece_of(r), packed + r * count, count);
    }
    check("ncclReduceScatter", nccl_.reduce_scatter(packed, sum, count, kNcclBfloat16, kNcclSum,
                                                    comm_, stream_.handle()));
    stream_.widen_bf16(sum, piece_of(rank()), count);
  }
}

void NcclCollective::all_reduce_rounded(std::span<float> values) {
  uint16_t* const rounded = outgoing_bf16(0);
  const uint64_t most = piece_ * size();
  for (uint64_t at = 0; at < values.size(); at += most) {
    const auto piece = values.subspan(at, std::min<uint64_t>(most, values.size() - at));
    stream_.round_to_bf16(piece.data(), rounded, piece.size());
    check("ncclAllReduce", nccl_.all_reduce(rounded, rounded, piece.size(), kNcclBfloat16, kNcclSum,
                                            comm_, stream_.handle()));
    stream_.widen_bf16(rounded, piece.data(), piece.size());
  }
}

}  // namespace overspill
