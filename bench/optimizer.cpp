// The optimizer update beside what the memory can do and beside the plain way to write it, all in
// one run: every round runs each once, and ratios are medians over rounds. The same pool of
// threads, huge pages and task size for all; arrays far larger than the caches.
#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "engine/base/dtype.h"
#include "engine/base/parallel.h"
#include "engine/base/random.h"
#include "engine/base/simd.h"
#include "engine/bench/triad.h"
#include "optim/optimizer.h"

namespace overspill {
namespace {

constexpr uint64_t kTask = 1 << 15;

/// Zeroed memory in huge pages, kept to the end of the program.
std::byte* allocate(uint64_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    std::perror("bench_optimizer: mmap");
    std::exit(1);
  }
  madvise(memory, bytes, MADV_HUGEPAGE);
  return static_cast<std::byte*>(memory);
}
float* floats(uint64_t count) { return reinterpret_cast<float*>(allocate(count * sizeof(float))); }

float random_value(uint64_t key, uint64_t i, float size) {
  const auto bits = static_cast<int32_t>(random_bits(key, i) >> 32);
  return static_cast<float>(bits) * 0x1p-31f * size;
}
void fill(float* array, uint64_t count, uint64_t key, float size) {
  parallel_blocks(count, kTask, [=](uint64_t begin, uint64_t end) {
    for (uint64_t i = begin; i < end; ++i) array[i] = random_value(key, i, size);
  });
}
void fill_bf16(std::byte* array, uint64_t count, uint64_t key, float size) {
  auto* values = reinterpret_cast<uint16_t*>(array);
  parallel_blocks(count, kTask, [=](uint64_t begin, uint64_t end) {
    for (uint64_t i = begin; i < end; ++i) values[i] = float_to_bf16(random_value(key, i, size));
  });
}

struct PlainStep {
  float decay, beta2, one_minus_beta1, one_minus_beta2, step_size, inverse_sqrt_bias2, epsilon;
};

/// AdamW as one would write it, float32 throughout.
OVERSPILL_SIMD void plain_adamw(PlainStep s, float* __restrict p, const float* __restrict g,
                                float* __restrict m, float* __restrict v, uint64_t begin,
                                uint64_t end) {
  for (uint64_t i = begin; i < end; ++i) {
    m[i] += s.one_minus_beta1 * (g[i] - m[i]);
    v[i] = s.beta2 * v[i] + s.one_minus_beta2 * g[i] * g[i];
    p[i] = p[i] * s.decay -
           s.step_size * (m[i] / (std::sqrt(v[i]) * s.inverse_sqrt_bias2 + s.epsilon));
  }
}

/// bf16 copies of weights for compute, to nearest even; finite values only.
OVERSPILL_SIMD void copy_bf16(const float* __restrict from, uint16_t* __restrict to, uint64_t begin,
                              uint64_t end) {
  for (uint64_t i = begin; i < end; ++i) {
    const uint32_t bits = std::bit_cast<uint32_t>(from[i]);
    to[i] = static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
  }
}

struct Entry {
  std::string name;
  double bytes;  ///< per parameter, read and written
  std::function<void()> run;
  std::vector<double> seconds = {};
};

Entry triad_entry(uint64_t size) {
  float *a = floats(size), *b = floats(size), *c = floats(size);
  fill(b, size, 1, 1.0f);
  fill(c, size, 2, 1.0f);
  return {"STREAM triad", 12, [=] { triad(a, b, c, size); }};
}

std::vector<Entry> plain_entries(uint64_t size) {
  float *p = floats(size), *g = floats(size), *m = floats(size), *v = floats(size);
  auto* copy = reinterpret_cast<uint16_t*>(allocate(size * 2));
  fill(p, size, 3, 0.02f);
  fill(g, size, 4, 1e-3f);
  const PlainStep step{0.99999f, 0.999f, 0.1f, 0.001f, 1e-4f, 1.5f, 1e-8f};
  const auto update = [=] {
    parallel_blocks(size, kTask, [=](uint64_t begin, uint64_t end) {
      plain_adamw(step, p, g, m, v, begin, end);
    });
  };
  const auto update_and_copy = [=] {
    update();
    parallel_blocks(size, kTask,
                    [=](uint64_t begin, uint64_t end) { copy_bf16(p, copy, begin, end); });
  };
  return {{"plain float32", 28, update}, {"plain float32, then bf16 copy", 34, update_and_copy}};
}

Entry engine_entry(const std::string& name, OptimizerKind kind, StateFormat state, uint64_t size) {
  const OptimizerSettings settings{
      .kind = kind, .state = state, .beta2 = 0.999, .weight_decay = 0.1};
  const StateLayout layout = state_layout(settings, size, 0);
  const UpdateChunk chunk{
      allocate(size * 2), allocate(layout.bytes), allocate(size * 2), size, 0, 0, 0};
  fill_bf16(chunk.weight, size, 5, 0.02f);
  fill_bf16(const_cast<std::byte*>(chunk.gradient), size, 6, 1e-3f);
  const std::vector<double> rates = {1e-4};
  uint64_t t = 0;
  const double once = static_cast<double>(layout.bytes + size * 2) / static_cast<double>(size);
  return {name, 2 * once + 2, [=]() mutable {
            ++t;
            const UpdateRun runs[] = {{0, size}};
            update_chunk(settings, update_step(settings, rates, t, 1.0), chunk, runs, t == 1);
          }};
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}
double median_ratio(const Entry& a, const Entry& b) {
  std::vector<double> ratios;
  for (size_t i = 0; i < a.seconds.size(); ++i) ratios.push_back(a.seconds[i] / b.seconds[i]);
  return median(ratios);
}

void print_table(const std::vector<Entry>& entries, uint64_t size) {
  fmt::print("{:32} {:>7} {:>8} {:>7} {:>9} {:>9} {:>11}\n", "", "B/param", "ms", "GB/s",
             "of triad", "of plain", "plain+copy");
  const Entry &triad = entries[0], &plain = entries[1], &with_copy = entries[2];
  for (const Entry& entry : entries) {
    const double seconds = median(entry.seconds);
    const double of_triad = entry.bytes / triad.bytes / median_ratio(entry, triad);
    fmt::print("{:32} {:7.2f} {:8.2f} {:7.2f} {:9.3f} {:9.3f} {:11.3f}\n", entry.name, entry.bytes,
               seconds * 1e3, entry.bytes * static_cast<double>(size) / seconds * 1e-9, of_triad,
               median_ratio(entry, plain), median_ratio(entry, with_copy));
  }
}

int run(uint64_t size, int rounds) {
  std::vector<Entry> entries = {triad_entry(size)};
  for (Entry& entry : plain_entries(size)) entries.push_back(std::move(entry));
  using enum StateFormat;
  using enum OptimizerKind;
  entries.push_back(engine_entry("AdamW, float32 state", adamw, float32, size));
  entries.push_back(engine_entry("AdamW, bf16 state", adamw, bfloat16, size));
  entries.push_back(engine_entry("AdamW, int8 state", adamw, int8, size));
  entries.push_back(engine_entry("Lion, bf16 state", lion, bfloat16, size));
  entries.push_back(engine_entry("Lion, int8 state", lion, int8, size));
  for (int round = -2; round < rounds; ++round) {  // two to warm up
    for (Entry& entry : entries) {
      const auto start = std::chrono::steady_clock::now();
      entry.run();
      const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
      if (round >= 0) entry.seconds.push_back(seconds.count());
    }
  }
  fmt::print(
      "{} Mi parameters, {} threads, {} rounds; \"of triad\" compares bytes per second, the "
      "last two columns time\n",
      size >> 20, parallel_threads(), rounds);
  print_table(entries, size);
  return 0;
}

}  // namespace
}  // namespace overspill

int main(int argc, char** argv) {
  const int mebi = argc > 1 ? std::atoi(argv[1]) : 64;
  const int rounds = argc > 2 ? std::atoi(argv[2]) : 15;
  if (mebi <= 0 || rounds <= 0) {
    std::fprintf(stderr, "usage: bench_optimizer [MEBIPARAMETERS] [ROUNDS]\n");
    return 2;
  }
  return overspill::run(static_cast<uint64_t>(mebi) << 20, rounds);
}
