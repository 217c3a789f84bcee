// What a call of the fake NCCL does to memory once all ranks have come.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/collective/nccl_library.h"

namespace overspill {

enum class FakeNcclKind { all_gather, reduce_scatter, all_reduce, broadcast, group };

inline uint64_t fake_nccl_width(int type) {
  return type == kNcclUint8 ? 1 : type == kNcclBfloat16 ? 2 : 4;
}

/// Done for all ranks by the one that comes last. Sources may lie inside targets. Sums are made as
/// a ring makes them, from the rank after the owner on, bf16 rounded at every hop.
void fake_nccl_move(const std::vector<const void*>& from, const std::vector<void*>& to,
                    FakeNcclKind kind, uint64_t count, int type, int root);

}  // namespace overspill
