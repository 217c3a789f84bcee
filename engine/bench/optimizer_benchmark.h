// `overspill bench optimizer`: updates of chunks in memory, for several rules and numbers of
// threads, and the reductions of gradients. One call, one thread.
#pragma once

#include <string>
#include <vector>

#include "engine/base/units.h"
#include "engine/bench/bench_rounds.h"
#include "engine/bench/bench_section.h"
#include "engine/plan/profile.h"
#include "offload/arena.h"
#include "optim/optimizer.h"

namespace overspill {

struct OptimizerBenchOptions {
  uint64_t chunk_parameters = uint64_t{4} << 20;  ///< the largest default; a multiple of 4096
  uint64_t parameters = uint64_t{32} << 20;       ///< of all chunks: larger than the caches
  RoundOptions rounds{.rounds = 5, .seconds = 0.15};
};

/// Chunks in memory whose updates a benchmark repeats, one after the other. The chunks' states have
/// room for any rule; each rule takes them over by BenchTask::prepare.
class UpdateWorks {
 public:
  explicit UpdateWorks(const OptimizerBenchOptions& options);
  /// One update of the next chunk; amount: its parameters. `parameters`: of a chunk, at most the
  /// options'.
  BenchWork update(const OptimizerSettings& rule, uint64_t parameters) const;
  /// Sets all moments to those of a first step.
  std::function<void()> first_step(const OptimizerSettings& rule) const;
  /// The next chunk's gradient sums: sum of squares, and rounding to bf16; amount: elements.
  BenchWork reduce_gradient() const;
  BenchWork export_gradient() const;

 private:
  struct Buffers {
    std::byte *weights, *gradients, *states;
    float *sums, *averages;
  };
  Buffers buffers() const;
  static void update_one(const Buffers& buffers, const OptimizerSettings& rule, uint64_t chunk,
                         uint64_t room, uint64_t parameters, uint64_t step);

  uint64_t chunk_, chunks_;
  Arena weights_, gradients_, states_, sums_;
  mutable std::vector<float> averages_;  ///< of a chunk as one matrix
};

/// Parameters per second on so many threads.
struct ThreadRate {
  uint32_t threads = 0;
  double parameters_per_second = 0;
};

struct OptimizerReport {
  uint64_t chunk_parameters = 0;
  uint32_t threads = 0;                             ///< of a run
  std::vector<UpdateRate> updates;                  ///< with all threads
  double update_latency = 0;                        ///< seconds of a chunk, besides its parameters
  double reduce_gradient = 0, export_gradient = 0;  ///< elements per second
  std::vector<ThreadRate> scaling;  ///< of the first rule; ascending, to all threads
};

/// Throws Error(cancelled) when `stop` was set, Error(does_not_fit) without the memory.
OptimizerReport run_optimizer_benchmark(const OptimizerBenchOptions& options,
                                        const std::atomic<bool>& stop,
                                        const BenchProgress& progress);

BenchSection optimizer_section(const OptimizerReport& report);
/// host.updates and update_latency, device.reduce_gradient and export_gradient.
void fill_profile(const OptimizerReport& report, HardwareProfile& profile);

/// Powers of two below `threads`, then all.
std::vector<uint32_t> thread_counts(uint32_t threads);

/// "adamw, float32 state"
std::string rule_name(OptimizerKind kind, StateFormat state);

}  // namespace overspill
