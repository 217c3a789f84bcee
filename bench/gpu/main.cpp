// overspill_gpu_bench: a short benchmark of a GPU and of the engine's work on it, as tables and one
// JSON object. A few minutes at most; without a GPU it says so.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>

#include "bench/gpu/sections.h"
#include "engine/base/error.h"
#include "engine/base/fd.h"
#include "engine/base/units.h"
#include "engine/bench/copy_benchmark.h"

namespace overspill {
namespace {

constexpr uint64_t kMostMemory = 32 * kGiB;
constexpr RoundOptions kRounds{.rounds = 3, .seconds = 0.05};
constexpr int kNoGpu = 77;  // which ctest takes for skipped

struct Arguments {
  std::filesystem::path json;
  std::vector<std::filesystem::path> tests;
  std::vector<std::string> notes;
  std::vector<std::filesystem::path> drives;
  uint32_t gpu = 0;
};

void show_progress(size_t, size_t, const std::string& text) { fmt::print(stderr, "{}\n", text); }

CopyReport measure_copies(uint32_t gpu, const BenchProgress& progress) {
  CopyBenchOptions options;
  options.sizes = {kMiB, 16 * kMiB, 256 * kMiB};
  options.devices = [gpu](uint64_t bytes) {
    CopyDevices one;
    one.devices.push_back(
        {.device = make_cuda_device(bytes, gpu), .gpu = cuda_devices().gpus.at(gpu)});
    return one;
  };
  const std::atomic<bool> stop = false;
  return run_copy_benchmark(options, stop, progress);
}

/// Four fifths of the GPU at most: others may use it too.
std::unique_ptr<CudaDevice> open_device(const CudaGpu& gpu) {
  return make_cuda_device(std::min(kMostMemory, gpu.memory_bytes / 5 * 4), gpu.index);
}

using AddSection = std::function<void(BenchSection)>;

/// What the GPU does by itself; its memory is free again afterwards.
HardwareProfile measure_work(const CudaGpu& gpu, const CopyReport& copies,
                             const GpuBenchSizes& sizes, const BenchProgress& progress,
                             const AddSection& add) {
  const std::unique_ptr<CudaDevice> device = open_device(gpu);
  GpuBench bench(*device, kRounds, progress);
  const BenchSection kernels = kernels_section(bench, sizes);
  add(kernels);
  const BenchSection gemm = gemm_section(bench, sizes);
  add(gemm);
  add(attention_section(bench, sizes));
  add(blocks_section(bench, sizes, fastest_product(gemm)));
  return measured_profile(gpu, copies, kernels, gemm);
}

std::vector<BenchSection> measure(const Arguments& arguments, const CudaGpu& gpu) {
  const BenchProgress progress = show_progress;
  std::vector<BenchSection> sections;
  const AddSection add = [&](BenchSection section) {
    fmt::print("\n{}", section.text);
    std::fflush(stdout);
    sections.push_back(std::move(section));
  };
  if (!arguments.tests.empty() || !arguments.notes.empty())
    add(tests_section(arguments.tests, arguments.notes));
  const CopyReport copies = measure_copies(gpu.index, progress);
  add(copy_section(copies));
  const GpuBenchSizes sizes;
  const HardwareProfile profile = measure_work(gpu, copies, sizes, progress, add);
  const StepPlace place{.gpu = gpu.index, .drives = arguments.drives, .rounds = kRounds};
  add(step_section(sizes.step, place, progress, profile));
  return sections;
}

int run(const Arguments& arguments) {
  const CudaGpus found = cuda_devices();
  if (arguments.gpu >= found.gpus.size()) {
    fmt::print(stderr, "overspill_gpu_bench: no GPU {}: {}\n", arguments.gpu,
               found.gpus.empty() ? found.absence : "see `overspill info`");
    return kNoGpu;
  }
  const CudaGpu& gpu = found.gpus[arguments.gpu];
  BenchHost host = describe_bench_host(read_machine());
  host.machine = fmt::format("{}, {}", gpu.name, host.machine);
  fmt::print("{}, {}, compute capability {}.{}\n", host.machine, format_bytes(gpu.memory_bytes),
             gpu.capability_major, gpu.capability_minor);
  const std::vector<BenchSection> sections = measure(arguments, gpu);
  if (!arguments.json.empty()) write_text_file(arguments.json, sections_json(host, sections));
  return 0;
}

}  // namespace
}  // namespace overspill

int main(int argc, char** argv) {
  overspill::Arguments arguments;
  CLI::App app("Copies, kernels, products of matrices, attention and a training step on a GPU");
  app.add_option("--json", arguments.json, "Write all results as JSON");
  app.add_option("--tests", arguments.tests,
                 "Include what --gtest_output=json:FILE wrote; may be repeated");
  app.add_option("--note", arguments.notes, "To say beside the tests; may be repeated");
  app.add_option("--path", arguments.drives,
                 "A directory on a drive, to keep the step's optimizer state on; may be repeated")
      ->check(CLI::ExistingDirectory);
  app.add_option("--gpu", arguments.gpu, "Which one (default: 0)");
  CLI11_PARSE(app, argc, argv);
  try {
    return overspill::run(arguments);
  } catch (const std::exception& error) {
    fmt::print(stderr, "overspill_gpu_bench: {}\n", error.what());
    return 1;
  }
}
