// One function per width of vector.
#include "engine/bench/triad.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "engine/base/parallel.h"

namespace overspill {
namespace {

constexpr uint64_t kTask = 1 << 15;

void triad_plain(float* a, const float* b, const float* c, uint64_t begin, uint64_t end) {
  for (uint64_t i = begin; i < end; ++i) a[i] = b[i] + 3.0f * c[i];
}

#if defined(__x86_64__)
__attribute__((target("avx512f"))) void triad_avx512(float* a, const float* b, const float* c,
                                                     uint64_t begin, uint64_t end) {
  const __m512 scalar = _mm512_set1_ps(3.0f);
  for (uint64_t i = begin; i < end; i += 16) {
    _mm512_stream_ps(a + i, _mm512_load_ps(b + i) + scalar * _mm512_load_ps(c + i));
  }
}
void triad_sse2(float* a, const float* b, const float* c, uint64_t begin, uint64_t end) {
  const __m128 scalar = _mm_set1_ps(3.0f);
  for (uint64_t i = begin; i < end; i += 4) {
    _mm_stream_ps(a + i, _mm_load_ps(b + i) + scalar * _mm_load_ps(c + i));
  }
}
void triad_part(float* a, const float* b, const float* c, uint64_t begin, uint64_t end) {
  static const bool wide = __builtin_cpu_supports("avx512f");
  const uint64_t whole = begin + (end - begin) / 16 * 16;
  wide ? triad_avx512(a, b, c, begin, whole) : triad_sse2(a, b, c, begin, whole);
  _mm_sfence();
  triad_plain(a, b, c, whole, end);
}
#else
constexpr auto triad_part = triad_plain;
#endif

}  // namespace

void triad(float* a, const float* b, const float* c, uint64_t size) {
  parallel_blocks(size, kTask,
                  [=](uint64_t begin, uint64_t end) { triad_part(a, b, c, begin, end); });
}

}  // namespace overspill
