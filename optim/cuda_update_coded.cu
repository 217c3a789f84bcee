// Updates with moments in bf16 and in int8, coded as optim/moment_formats.h does, operation by
// operation. In int8 a warp has a block of 256: a lane's eight parameters stay in its registers
// until the warp knows the block's largest moments.
#include "optim/cuda_update_rules.h"
#include "optim/moment_formats.h"

namespace overspill::cuda {
namespace {

constexpr int kThreads = 256;
static_assert(kWarp * kPack == kStateBlock);

/// block_rounding_key, of a block of the run.
__device__ uint64_t block_key(const DeviceRun& a, uint64_t block) {
  uint64_t bits = a.rounding_key ^ ((a.first_block + block) * 0xd1342543de82ef95ull);
  bits += 0x9e3779b97f4a7c15ull;
  bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9ull;
  bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebull;
  return bits ^ (bits >> 31);
}

__device__ uint32_t random_of(uint64_t key, uint32_t index) {
  uint32_t bits = static_cast<uint32_t>(key) + index * kIndexStride;
  bits = (bits ^ (bits >> 16)) * kMix1;
  bits ^= static_cast<uint32_t>(key >> 32);
  bits = (bits ^ (bits >> 15)) * kMix2;
  return bits ^ (bits >> 16);
}

template <Rule kRule, MasterFormat kMaster>
struct UpdateBf16 {
  static constexpr bool kSecond = kHasSecond<kRule>;
  DeviceRun run;

  template <int kWidth>
  __device__ void at(uint64_t i) const {
    float p[kWidth], g[kWidth], m[kWidth], v[kWidth] = {};
    load_parameters<kMaster>(run, i, p, g);
    load<kWidth>(reinterpret_cast<const bf16*>(run.first) + i, m);
    if constexpr (kSecond) load<kWidth>(reinterpret_cast<const bf16*>(run.second) + i, v);
    const uint64_t key = block_key(run, i / kStateBlock);
    alignas(16) uint16_t first[kWidth], second[kWidth];
    for (int j = 0; j < kWidth; ++j) {
      p[j] = next_master<kRule>(run, p[j], g[j], m[j], v[j]);
      const uint32_t random = random_of(key, static_cast<uint32_t>(i % kStateBlock) + j);
      first[j] = static_cast<uint16_t>((bits_of_float(m[j]) + (random & 0xffffu)) >> 16);
      second[j] = static_cast<uint16_t>((bits_of_float(v[j]) + (random >> 16)) >> 16);
    }
    store_master<kMaster>(p, run, i);
    store_halves<kWidth>(first, run.first, i);
    if constexpr (kSecond) store_halves<kWidth>(second, run.second, i);
  }
};

__device__ float scale_of(float largest) { return largest == 0 ? 0.0f : fmaxf(largest, 0x1p-90f); }
__device__ float factor_of(float scale, float top) {
  return scale == 0 ? 0.0f : exact_mul(exact_div(top, scale), 1 + 0x1p-22f);
}

__device__ float decode(uint32_t code, float top_inverse, float scale) {
  const float level = exact_sub(float_of_bits(kTwoBits + (code << kLevelShift)), 2.0f);
  return exact_mul(exact_mul(level, top_inverse), scale);
}
__device__ uint32_t encode(float magnitude, float factor, uint32_t noise) {
  const float level = exact_add(exact_mul(magnitude, factor), 2.0f);
  return (bits_of_float(level) + noise) >> kLevelShift;
}

__device__ float first_of(uint8_t code, float scale) {
  const float magnitude = decode(code & 0x7fu, kFirstTopInverse, scale);
  return (code & 0x80u) != 0 ? -magnitude : magnitude;
}
__device__ uint8_t code_of_first(float value, float factor, uint32_t random) {
  const uint32_t sign = bits_of_float(value) >> 24 & 0x80u;
  return static_cast<uint8_t>(sign | encode(fabsf(value), factor, random & kNoiseMask));
}
__device__ uint8_t code_of_second(float value, float factor, uint32_t random) {
  const uint32_t least = value > 0 ? 0x401u : 0;
  const uint32_t code = encode(value, factor, random >> kNoiseShift & kNoiseMask);
  return static_cast<uint8_t>(code > least ? code : least);
}

using Codes = uint8_t[kPack];

__device__ void load_codes(const std::byte* from, Codes& codes) {
  *reinterpret_cast<uint2*>(codes) = *reinterpret_cast<const uint2*>(from);
}
/// The first `count`.
__device__ void store_codes(const Codes& codes, int count, std::byte* to) {
  if (count == kPack) {
    *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(codes);
  } else {
    for (int j = 0; j < kPack; ++j) {
      if (j < count) to[j] = static_cast<std::byte>(codes[j]);
    }
  }
}
template <MasterFormat kMaster>
__device__ void store_masters(const float (&p)[kPack], int count, const DeviceRun& run,
                              uint64_t i) {
  if (count == kPack) {
    store_master<kMaster>(p, run, i);
  } else {
    for (int j = 0; j < kPack; ++j) {
      const float one[1] = {p[j]};
      if (j < count) store_master<kMaster>(one, run, i + j);
    }
  }
}

/// The parameters of one lane, loaded and updated. Those after the run's end are in the chunk too,
/// up to the block's end, but count as zero.
template <Rule kRule, MasterFormat kMaster>
struct Lane {
  float p[kPack], m[kPack], v[kPack];

  __device__ void update(const DeviceRun& run, uint64_t i, int count) {
    const uint64_t block = i / kStateBlock;
    float g[kPack];
    load_parameters<kMaster>(run, i, p, g);
    alignas(8) Codes first, second = {};
    load_codes(run.first + i, first);
    if constexpr (kHasSecond<kRule>) load_codes(run.second + i, second);
    const float first_scale = run.first_scales[block];
    const float second_scale = kHasSecond<kRule> ? run.second_scales[block] : 0.0f;
    for (int j = 0; j < kPack; ++j) {
      const bool inside = j < count;
      p[j] = inside ? p[j] : 0.0f;
      g[j] = inside ? g[j] : 0.0f;
      m[j] = inside ? first_of(first[j], first_scale) : 0.0f;
      v[j] = inside ? decode(second[j], kSecondTopInverse, second_scale) : 0.0f;
      p[j] = next_master<kRule>(run, p[j], g[j], m[j], v[j]);
    }
  }
};

template <Rule kRule, MasterFormat kMaster>
__global__ void __launch_bounds__(kThreads) update_int8(DeviceRun run) {
  constexpr bool kSecond = kHasSecond<kRule>;
  const uint64_t i = (uint64_t{blockIdx.x} * kThreads + threadIdx.x) * kPack;
  const uint64_t block = i / kStateBlock;
  if (block * kStateBlock >= run.size) return;  // whole warps
  const uint64_t left = i < run.size ? run.size - i : 0;
  const int count = left < kPack ? static_cast<int>(left) : kPack;
  Lane<kRule, kMaster> lane;
  lane.update(run, i, count);
  store_masters<kMaster>(lane.p, count, run, i);
  float largest_first = 0, largest_second = 0;
  for (int j = 0; j < kPack; ++j) {
    largest_first = fmaxf(largest_first, fabsf(lane.m[j]));
    largest_second = fmaxf(largest_second, lane.v[j]);
  }
  const float first_scale = scale_of(warp_max(largest_first));
  const float second_scale = kSecond ? scale_of(warp_max(largest_second)) : 0.0f;
  const float first_factor = factor_of(first_scale, kFirstTop);
  const float second_factor = factor_of(second_scale, kSecondTop);
  const uint64_t key = block_key(run, block);
  alignas(8) Codes first, second;
  for (int j = 0; j < kPack; ++j) {
    const uint32_t random = random_of(key, static_cast<uint32_t>(i % kStateBlock) + j);
    first[j] = code_of_first(lane.m[j], first_factor, random);
    second[j] = code_of_second(lane.v[j], second_factor, random);
  }
  store_codes(first, count, run.first + i);
  if constexpr (kSecond) store_codes(second, count, run.second + i);
  warp_barrier();  // the old scales are read
  if (i % kStateBlock != 0) return;
  run.first_scales[block] = first_scale;
  if constexpr (kSecond) run.second_scales[block] = second_scale;
}

template <Rule kRule, MasterFormat kMaster>
void launch(cudaStream_t stream, StateFormat state, const DeviceRun& run) {
  if (run.size == 0) return;
  if (state == StateFormat::bfloat16) {
    launch_elementwise(stream, UpdateBf16<kRule, kMaster>{run}, 0, run.size, true);
  } else {
    const dim3 grid = blocks_x(ceil_div(run.size, uint64_t{kThreads} * kPack));
    OVERSPILL_LAUNCH((update_int8<kRule, kMaster>), grid, kThreads, 0, stream, run);
  }
}

template <MasterFormat kMaster>
void launch(cudaStream_t stream, StateFormat state, Rule rule, const DeviceRun& run) {
  switch (rule) {
    case Rule::adamw: return launch<Rule::adamw, kMaster>(stream, state, run);
    case Rule::lion: return launch<Rule::lion, kMaster>(stream, state, run);
    case Rule::sgd_with_momentum:
      return launch<Rule::sgd_with_momentum, kMaster>(stream, state, run);
    case Rule::sgd:
    case Rule::adafactor: break;
  }
  launch_failed("update", "the rule has no coded moments");
}

}  // namespace

void launch_coded_update(cudaStream_t stream, StateFormat state, MasterFormat master, Rule rule,
                         const DeviceRun& run) {
  if (master == MasterFormat::split) {
    launch<MasterFormat::split>(stream, state, rule, run);
  } else {
    launch<MasterFormat::float32>(stream, state, rule, run);
  }
}

}  // namespace overspill::cuda
