// One loop for each type.
#include "engine/model/add_gradient.h"

#include "engine/base/parallel.h"

namespace overspill {
namespace {

constexpr uint64_t kBlock = 1 << 16;

template <class Value, class Convert>
void add(const Value* values, float* sums, uint64_t count, bool first, const Convert& convert) {
  parallel_blocks(count, kBlock, [&](uint64_t begin, uint64_t end) {
    if (first) {
      for (uint64_t i = begin; i < end; ++i) sums[i] = convert(values[i]);
    } else {
      for (uint64_t i = begin; i < end; ++i) sums[i] += convert(values[i]);
    }
  });
}

}  // namespace

void add_gradient(const void* values, DType type, float* sums, uint64_t count, bool first) {
  switch (type) {
    case DType::f32:
      return add(static_cast<const float*>(values), sums, count, first, [](float v) { return v; });
    case DType::bf16:
      return add(static_cast<const uint16_t*>(values), sums, count, first, bf16_to_float);
    case DType::f16:
      return add(static_cast<const uint16_t*>(values), sums, count, first, f16_to_float);
  }
}

}  // namespace overspill
