// `overspill bench compute`: forward and backward of real Llama blocks, the head's loss, and single
// products of matrices, over hidden sizes and micro-batches. One call, one thread.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine/base/units.h"
#include "engine/bench/bench_rounds.h"
#include "engine/bench/bench_section.h"
#include "engine/model/llama.h"
#include "engine/plan/profile.h"
#include "offload/arena.h"

namespace overspill {

struct ComputeBenchOptions {
  std::vector<uint32_t> hidden_sizes = {256, 512, 1024, 2048};  ///< multiples of 256
  std::vector<uint32_t> tokens = {64, 256, 1024};               ///< one sequence each
  uint32_t vocabulary = 32000;
  uint64_t weight_bytes = 512 * kMiB;  ///< calls cycle through so much: larger than the caches
  RoundOptions rounds{.rounds = 3, .seconds = 0.05};
};

/// A model of one block with ffn 8/3 of hidden, head_dim 64 and four query heads per key.
ModelShape bench_model(uint32_t hidden, uint32_t vocabulary);

/// Layers of several shapes whose passes a benchmark repeats. All share one memory of bf16 weights,
/// and every call takes the next layer in it, as a step does.
class ComputeWorks {
 public:
  explicit ComputeWorks(const ComputeBenchOptions& options);
  ~ComputeWorks();

  /// One call of the op on a layer of the shape; amount: its FLOPs.
  BenchTask task(OpKind op, uint32_t hidden, uint32_t tokens) const;
  /// One product of the host's linear kernel.
  BenchTask product(const std::string& name, const GemmPoint& shape) const;

 private:
  struct Shape {
    uint32_t hidden, tokens;
    std::unique_ptr<Llama> llama;
  };
  struct Memory;
  const Shape& shape(uint32_t hidden, uint32_t tokens) const;

  std::vector<Shape> shapes_;
  std::vector<int32_t> targets_;
  std::unique_ptr<Memory> memory_;
};

struct LayerRate {
  uint32_t hidden = 0;
  ComputePoint point;
};
struct ProductRate {
  std::string name;  ///< of the projection
  GemmPoint point;
};

struct ComputeReport {
  uint32_t threads = 0, vocabulary = 0;
  std::vector<LayerRate> layers;
  std::vector<ProductRate> products;
  double peak_flops() const;  ///< the fastest of all
};

/// Throws Error(cancelled) when `stop` was set, Error(does_not_fit) without the memory.
ComputeReport run_compute_benchmark(const ComputeBenchOptions& options,
                                    const std::atomic<bool>& stop, const BenchProgress& progress);

BenchSection compute_section(const ComputeReport& report);
/// device.compute, gemm and peak_flops, of the host as the device.
void fill_profile(const ComputeReport& report, HardwareProfile& profile);

}  // namespace overspill
