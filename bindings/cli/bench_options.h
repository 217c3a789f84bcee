// From the words of `overspill bench` to the options of every benchmark. Pure functions.
#pragma once

#include "bindings/cli/bench_command.h"
#include "engine/bench/collective_benchmark.h"
#include "engine/bench/compute_benchmark.h"
#include "engine/bench/contention_benchmark.h"
#include "engine/bench/copy_benchmark.h"
#include "engine/bench/nvme_benchmark.h"
#include "engine/bench/optimizer_benchmark.h"
#include "offload/topology.h"

namespace overspill {

/// Each throws Error(invalid_config) naming the option.
NvmeBenchOptions nvme_options(const BenchArguments& arguments);
CopyBenchOptions copy_options(const BenchArguments& arguments, const Machine& machine);
OptimizerBenchOptions optimizer_options(const BenchArguments& arguments, const Machine& machine);
ComputeBenchOptions compute_options(const BenchArguments& arguments, const Machine& machine);
CollectiveBenchOptions collective_options(const BenchArguments& arguments);
/// `drives`: what the drives' benchmark recommended; without paths there is none.
ContentionBenchOptions contention_options(const BenchArguments& arguments, const Machine& machine,
                                          const std::optional<DriveSettings>& drives);

}  // namespace overspill
