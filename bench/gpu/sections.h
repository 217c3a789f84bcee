// What overspill_gpu_bench measures, a section of its report each, and at which sizes.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "bench/gpu/gpu_bench.h"
#include "bench/gpu/step.h"
#include "engine/bench/bench_section.h"
#include "engine/bench/copy_benchmark.h"
#include "engine/model/kernels.h"

namespace overspill {

struct LinearCase {
  std::string name;
  LinearShape shape;
};
struct AttentionCase {
  std::string name;
  AttentionShape shape;
  bool portable = true;  ///< measure the kernel without tensor cores too
};

struct BlockCase {
  std::string name;
  uint32_t hidden, intermediate, heads, kv_heads, head_dim;
  uint64_t tokens;  ///< in one sequence
};

/// The defaults are larger than L2 caches, and the shapes those of models.
struct GpuBenchSizes {
  uint64_t rows = 8192, width = 8192, head_dim = 128;  ///< of activations
  uint64_t table_rows = 32768;                         ///< of the embedding, at least `rows`
  uint64_t loss_rows = 1024, vocabulary = 128256;
  std::vector<LinearCase> linears = {
      {"8B: query", {4096, 4096, 4096}},    {"8B: gate", {4096, 4096, 14336}},
      {"8B: down", {4096, 14336, 4096}},    {"70B: query", {4096, 8192, 8192}},
      {"70B: gate", {4096, 8192, 28672}},   {"70B: down", {4096, 28672, 8192}},
      {"405B: gate", {4096, 16384, 53248}}, {"405B: down", {4096, 53248, 16384}}};
  std::vector<AttentionCase> attentions = {{"8B, 4096 tokens", {1, 4096, 32, 8, 128}, true},
                                           {"8B, 8192 tokens", {1, 8192, 32, 8, 128}, false},
                                           {"70B, 8192 tokens", {1, 8192, 64, 8, 128}, false},
                                           {"405B, 8192 tokens", {1, 8192, 128, 8, 128}, false}};
  std::vector<BlockCase> blocks = {{"8B", 4096, 14336, 32, 8, 128, 4096},
                                   {"70B", 8192, 28672, 64, 8, 128, 4096},
                                   {"405B", 16384, 53248, 128, 8, 128, 4096}};
  StepCase step{};
};

/// Bytes that a kernel must move, as a share of the GPU's own copies (which read and write).
BenchSection kernels_section(GpuBench& bench, const GpuBenchSizes& sizes);
/// Products of cuBLASLt; a note where it is not installed.
BenchSection gemm_section(GpuBench& bench, const GpuBenchSizes& sizes);
/// cuDNN's attention and the portable one; a note where cuDNN is missing or has no plan.
BenchSection attention_section(GpuBench& bench, const GpuBenchSizes& sizes);
/// FLOPs per second; 0 when none was measured.
double fastest_product(const BenchSection& gemm);
/// Blocks of models, beside the fastest product of matrices; a note where they cannot run.
BenchSection blocks_section(GpuBench& bench, const GpuBenchSizes& sizes, double fastest_product);

/// What the sections measured, as predictions take it.
HardwareProfile measured_profile(const CudaGpu& gpu, const CopyReport& copies,
                                 const BenchSection& kernels, const BenchSection& gemm);
/// Steps of a run that streams its weights, beside their prediction by the profile and the rates of
/// the step's own parts; a note where it cannot run. Takes memory of the GPU of its own.
BenchSection step_section(const StepCase& step, const StepPlace& place,
                          const BenchProgress& progress, HardwareProfile profile);

/// What runs of tests found, from the files that --gtest_output=json:FILE wrote, and notes on it.
/// Throws Error(invalid_config) when a file is something else.
BenchSection tests_section(const std::vector<std::filesystem::path>& results,
                           std::vector<std::string> notes);

}  // namespace overspill
