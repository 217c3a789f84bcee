// A ring's sums and copies, on host memory.
#include "tests/emulation/fake_nccl_moves.h"

#include <cstring>

#include "engine/base/dtype.h"
#include "engine/collective/nccl_library.h"

namespace overspill {
namespace {

float load(const void* memory, int type, uint64_t i) {
  if (type == kNcclBfloat16) return bf16_to_float(static_cast<const uint16_t*>(memory)[i]);
  if (type == kNcclFloat32) return static_cast<const float*>(memory)[i];
  return static_cast<const uint8_t*>(memory)[i];
}
void store(void* memory, int type, uint64_t i, float value) {
  if (type == kNcclBfloat16) {
    static_cast<uint16_t*>(memory)[i] = float_to_bf16(value);
  } else if (type == kNcclFloat32) {
    static_cast<float*>(memory)[i] = value;
  } else {
    static_cast<uint8_t*>(memory)[i] = static_cast<uint8_t>(value);
  }
}

/// Element i over all ranks as a ring makes it: from the rank after the owner on.
float ring_sum(const std::vector<const void*>& from, int type, uint64_t i, int owner) {
  const int size = static_cast<int>(from.size());
  float sum = load(from[(owner + 1) % size], type, i);
  for (int hop = 2; hop <= size; ++hop) {
    sum += load(from[(owner + hop) % size], type, i);
    if (type == kNcclBfloat16) sum = bf16_to_float(float_to_bf16(sum));
  }
  return sum;
}

}  // namespace

void fake_nccl_move(const std::vector<const void*>& from, const std::vector<void*>& to,
                    FakeNcclKind kind, uint64_t count, int type, int root) {
  const int size = static_cast<int>(from.size());
  const uint64_t bytes = count * fake_nccl_width(type);
  if (kind == FakeNcclKind::broadcast) {
    for (void* target : to) {
      if (target != from[root]) std::memcpy(target, from[root], bytes);
    }
  } else if (kind == FakeNcclKind::all_gather) {
    for (void* target : to) {
      for (int r = 0; r < size; ++r) {
        auto* place = static_cast<char*>(target) + r * bytes;
        if (place != from[r]) std::memmove(place, from[r], bytes);
      }
    }
  } else {
    const bool scatter = kind == FakeNcclKind::reduce_scatter;
    const uint64_t total = scatter ? count * size : count;
    std::vector<float> sums(total);
    for (uint64_t i = 0; i < total; ++i) {
      sums[i] = ring_sum(from, type, i, static_cast<int>(scatter ? i / count : i * size / total));
    }
    for (int r = 0; r < size; ++r) {
      const uint64_t begin = scatter ? r * count : 0;
      for (uint64_t i = 0; i < count; ++i) store(to[r], type, i, sums[begin + i]);
    }
  }
}

}  // namespace overspill
