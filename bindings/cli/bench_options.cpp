// Defaults, --quick, and what was asked for over both.
#include "bindings/cli/bench_options.h"

#include <algorithm>

#include "engine/base/error.h"
#include "engine/base/units.h"

namespace overspill {
namespace {

constexpr uint64_t kUsualMemory = 512 * kMiB;
constexpr uint64_t kLeastMemory = kMiB;

IoBackend parse_backend(const std::string& name) {
  return name == "io_uring"  ? IoBackend::io_uring
         : name == "libaio"  ? IoBackend::libaio
         : name == "threads" ? IoBackend::threads
                             : IoBackend::automatic;
}

std::vector<uint64_t> parse_sizes(const std::vector<std::string>& texts) {
  std::vector<uint64_t> sizes;
  for (const std::string& text : texts) sizes.push_back(parse_bytes(text));
  std::ranges::sort(sizes);
  return sizes;
}

/// Larger than all of the machine's caches, unless something else was asked for.
uint64_t memory_of(const BenchArguments& arguments, const Machine& machine) {
  if (arguments.memory.empty()) {
    return std::max(kUsualMemory, 2 * machine.l3_bytes * machine.l3_domains);
  }
  const uint64_t memory = parse_bytes(arguments.memory);
  if (memory >= kLeastMemory) return memory;
  fail(ErrorCode::invalid_config, "--memory {}: use at least {}", arguments.memory,
       format_bytes(kLeastMemory));
}

void set_seconds(const BenchArguments& arguments, RoundOptions& rounds) {
  if (arguments.quick) rounds = {.rounds = 3, .seconds = rounds.seconds / 2};
  if (arguments.seconds > 0) rounds.seconds = arguments.seconds / rounds.rounds;
}

}  // namespace

NvmeBenchOptions nvme_options(const BenchArguments& arguments) {
  NvmeBenchOptions options;
  options.paths = arguments.paths;
  options.backend = parse_backend(arguments.backend);
  options.verify = arguments.verify;
  if (arguments.quick) {
    options.bytes_per_path = kGiB;
    options.seconds_per_point = 0.5;
    options.block_sizes = {kMiB, 4 * kMiB};
    options.depths = {1, 4, 16};
    options.sequential = false;
  }
  if (!arguments.size.empty()) options.bytes_per_path = parse_bytes(arguments.size);
  if (arguments.seconds > 0) options.seconds_per_point = arguments.seconds;
  if (!arguments.depths.empty()) options.depths = arguments.depths;
  if (!arguments.block_sizes.empty()) options.block_sizes = parse_sizes(arguments.block_sizes);
  return options;
}

CopyBenchOptions copy_options(const BenchArguments& arguments, const Machine& machine) {
  CopyBenchOptions options;
  const uint64_t memory = memory_of(arguments, machine);
  options.bytes_per_direction = memory / 2;
  options.triad_bytes = memory / 4 * 3;
  set_seconds(arguments, options.rounds);
  if (arguments.quick) options.sizes = {64 * kKiB, kMiB, 16 * kMiB, 64 * kMiB};
  if (!arguments.copy_sizes.empty()) options.sizes = parse_sizes(arguments.copy_sizes);
  for (const uint64_t size : options.sizes) {
    if (size >= 4 * kKiB && size <= kGiB) continue;
    fail(ErrorCode::invalid_config, "--copy-size {}: use 4KiB to 1GiB", format_bytes(size));
  }
  return options;
}

OptimizerBenchOptions optimizer_options(const BenchArguments& arguments, const Machine& machine) {
  OptimizerBenchOptions options;
  constexpr uint64_t kBytesOfParameter = 16;
  options.parameters = memory_of(arguments, machine) / kBytesOfParameter;
  options.chunk_parameters = std::min(
      options.chunk_parameters, options.parameters / kParameterAlignment * kParameterAlignment);
  set_seconds(arguments, options.rounds);
  return options;
}

CollectiveBenchOptions collective_options(const BenchArguments& arguments) {
  CollectiveBenchOptions options;
  if (arguments.quick) {
    options.parts = {4096, uint64_t{1} << 20, uint64_t{8} << 20};
    options.rounds = 3;
  }
  if (arguments.seconds > 0) options.seconds = arguments.seconds;
  return options;
}

ComputeBenchOptions compute_options(const BenchArguments& arguments, const Machine& machine) {
  ComputeBenchOptions options;
  options.weight_bytes = memory_of(arguments, machine);
  set_seconds(arguments, options.rounds);
  if (arguments.quick) {
    options.hidden_sizes = {512, 2048};
    options.tokens = {64, 512};
  }
  if (!arguments.hidden_sizes.empty()) options.hidden_sizes = arguments.hidden_sizes;
  if (!arguments.tokens.empty()) options.tokens = arguments.tokens;
  if (arguments.vocabulary > 0) options.vocabulary = arguments.vocabulary;
  for (const uint32_t hidden : options.hidden_sizes) {
    if (hidden % 256 == 0) continue;
    fail(ErrorCode::invalid_config, "--hidden-size {} is no multiple of 256", hidden);
  }
  return options;
}

ContentionBenchOptions contention_options(const BenchArguments& arguments, const Machine& machine,
                                          const std::optional<DriveSettings>& drives) {
  ContentionBenchOptions options;
  if (drives) {
    options.paths = arguments.paths;
    options.drives = *drives;
    options.bytes_per_path =
        std::min(options.bytes_per_path, nvme_options(arguments).bytes_per_path);
  }
  const uint32_t hidden = options.compute.hidden_sizes.front();
  const uint32_t tokens = options.compute.tokens.front();
  options.optimizer = optimizer_options(arguments, machine);
  options.compute = compute_options(arguments, machine);
  options.compute.hidden_sizes = {std::min(hidden, std::ranges::max(options.compute.hidden_sizes))};
  options.compute.tokens = {std::min(tokens, std::ranges::max(options.compute.tokens))};
  set_seconds(arguments, options.rounds);
  return options;
}

}  // namespace overspill
