// The order of measurements. A drive's rate drifts while it is measured, so points are visited in
// two rounds, each in a random order of its own, and a point's rate is that of both rounds.
#include "engine/bench/nvme_benchmark.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>

#include "engine/base/error.h"
#include "engine/base/thread.h"
#include "engine/bench/bench_host.h"
#include "engine/bench/drive_runner.h"
#include "offload/numa_binding.h"
#include "offload/topology.h"

namespace overspill {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kRecordBytes = 48 * kMiB;  // of a chunk of 4 Mi parameters
constexpr uint32_t kPagesInMemory = 4;        // of each side
constexpr uint32_t kRounds = 2;
constexpr uint64_t kFirstStripe = 4 * kMiB;

std::string describe(const BenchPoint& point, const BenchRates& rates) {
  const std::string block = format_bytes(point.block_bytes);
  if (point.traffic == Traffic::mixed) {
    return fmt::format("{} blocks, read x {} and write x {}: {} + {}", block, point.read_depth,
                       point.write_depth, format_rate(rates.read), format_rate(rates.write));
  }
  const bool reads = point.traffic == Traffic::read;
  return fmt::format(
      "{} {}, {} blocks x {}: {}", order_name(point.order), traffic_name(point.traffic), block,
      reads ? point.read_depth : point.write_depth, format_rate(reads ? rates.read : rates.write));
}

/// The benchmark under way.
class Sweep {
 public:
  Sweep(const NvmeBenchOptions& options, const std::atomic<bool>& stop,
        const BenchProgress& progress);
  TargetResult measure(const std::string& name, const std::vector<fs::path>& paths);
  size_t targets() const { return options_.paths.size() + (options_.paths.size() > 1); }

 private:
  std::unique_ptr<DriveRunner> make_runner(const std::vector<fs::path>& paths, uint64_t stripe,
                                           bool verify, TargetResult& target);
  void run_points(DriveRunner& runner, const std::vector<BenchPoint>& points, TargetResult& target);
  void measure_checksums(TargetResult& target);
  void compare_nodes(DriveRunner& runner, TargetResult& target);
  void report(const TargetResult& target, const std::string& text);

  const NvmeBenchOptions& options_;
  const std::atomic<bool>& stop_;
  const BenchProgress& progress_;
  SweepGrid grid_;
  std::optional<BenchBuffers> buffers_;
  const Machine machine_;
  size_t most_mixed_ = 0, done_ = 0, total_ = 0;
};

SweepGrid make_grid(const NvmeBenchOptions& options) {
  const uint64_t page = bench_page_bytes(options.bytes_per_path);
  SweepGrid grid{.block_sizes = {},
                 .depths = options.depths,
                 // One page is asked for at a time; a little more shows that more does not help.
                 .most_in_flight = page / 3 * 4,
                 .sequential = options.sequential};
  for (const uint64_t block : options.block_sizes) {
    if (block <= page) grid.block_sizes.push_back(block);
  }
  std::ranges::sort(grid.block_sizes);
  std::ranges::sort(grid.depths);
  return grid;
}

Sweep::Sweep(const NvmeBenchOptions& options, const std::atomic<bool>& stop,
             const BenchProgress& progress)
    : options_(options),
      stop_(stop),
      progress_(progress),
      grid_(make_grid(options)),
      machine_(read_machine()) {
  const size_t alone = alone_points(grid_).size() * kRounds;
  // Which block size will be used for both at once is not known yet; the smallest has most pairs.
  most_mixed_ = mixed_points(grid_, grid_.block_sizes.front()).size();
  total_ = targets() * (alone + most_mixed_ * kRounds);
}

void Sweep::report(const TargetResult& target, const std::string& text) {
  progress_(done_, std::max(total_, done_), target.name + ": " + text);
}

std::unique_ptr<DriveRunner> Sweep::make_runner(const std::vector<fs::path>& paths, uint64_t stripe,
                                                bool verify, TargetResult& target) {
  report(target, "writing files");
  const DriveRunner::Options made{.directories = paths,
                                  .bytes_per_drive = options_.bytes_per_path,
                                  .stripe_bytes = std::min(stripe, buffers_->page_bytes),
                                  .verify = verify,
                                  .io = {.backend = options_.backend, .wrap = {}},
                                  .stop = &stop_};
  auto runner = std::make_unique<DriveRunner>(made, *buffers_);
  const double rate = runner->write_first();
  if (target.first_write_rate == 0) target.first_write_rate = rate;
  target.bytes = runner->bytes();
  target.direct = runner->direct();
  target.backend = runner->backend();
  return runner;
}

void Sweep::run_points(DriveRunner& runner, const std::vector<BenchPoint>& points,
                       TargetResult& target) {
  const double seconds = options_.seconds_per_point / kRounds;
  std::vector<BenchResult> results;
  for (const BenchPoint& point : points) results.push_back({point, {}});
  for (uint32_t round = 0; round < kRounds; ++round) {
    for (const BenchPoint& point : shuffled(points, done_ + 1)) {
      const BenchRates rates = runner.run(point, {.seconds = seconds});
      BenchRates& sum = std::ranges::find(results, point, &BenchResult::point)->rates;
      sum.read += rates.read / kRounds;
      sum.write += rates.write / kRounds;
      sum.cpu_seconds_per_gb += rates.cpu_seconds_per_gb / kRounds;
      sum.lane_cpu_seconds_per_gb += rates.lane_cpu_seconds_per_gb / kRounds;
      ++done_;
      report(target, describe(point, rates));
    }
  }
  target.results.insert(target.results.end(), results.begin(), results.end());
}

/// What a lane's thread costs at the recommended settings with checksums, which training has by
/// default.
void Sweep::measure_checksums(TargetResult& target) {
  const Recommendation& best = target.best;
  const BenchPoint point{.traffic = Traffic::mixed,
                         .order = PageOrder::random,
                         .block_bytes = best.block_bytes,
                         .read_depth = best.mixed_read_depth,
                         .write_depth = best.mixed_write_depth};
  const auto runner = make_runner(target.paths, best.block_bytes, /*verify=*/true, target);
  const BenchRates rates = runner->run(point, {.seconds = options_.seconds_per_point});
  target.checksum_cpu_seconds_per_gb = rates.lane_cpu_seconds_per_gb;
  report(target, fmt::format("with checksums: {:.3f} s of a lane's thread per GB",
                             rates.lane_cpu_seconds_per_gb));
}

/// Reads and writes at the recommended settings from every NUMA node in turn.
void Sweep::compare_nodes(DriveRunner& runner, TargetResult& target) {
  if (machine_.numa_nodes.size() < 2) return;
  const int home = target.paths.size() == 1 ? drive_numa_node(target.paths.front()) : -1;
  const Recommendation& best = target.best;
  for (const NumaNode& node : machine_.numa_nodes) {
    const CpuBinding binding(cpus_of_node(machine_, node.index));
    if (!binding.bound()) continue;
    bool placed = true;
    for (const Arena* arena : {&buffers_->read, &buffers_->write}) {
      placed = placed && place_on_node(arena->memory(), arena->bytes(), node.index);
    }
    if (!placed) continue;
    const auto measure = [&](Traffic traffic) {
      const BenchPoint point{.traffic = traffic,
                             .order = PageOrder::random,
                             .block_bytes = best.block_bytes,
                             .read_depth = best.read_depth,
                             .write_depth = best.write_depth};
      return runner.run(point, {.seconds = options_.seconds_per_point});
    };
    NodeResult result{
        .node = node.index,
        .local = home < 0 ? std::nullopt : std::optional(static_cast<uint32_t>(home) == node.index),
        .read = measure(Traffic::read).read,
        .write = measure(Traffic::write).write};
    report(target, fmt::format("NUMA node {}: read {}, write {}", node.index,
                               format_rate(result.read), format_rate(result.write)));
    target.nodes.push_back(result);
  }
}

TargetResult Sweep::measure(const std::string& name, const std::vector<fs::path>& paths) {
  // Anew, because compare_nodes leaves memory on the last node.
  buffers_.emplace(bench_page_bytes(options_.bytes_per_path), kPagesInMemory);
  TargetResult target;
  target.name = name;
  target.paths = paths;
  const std::vector<BenchPoint> points = alone_points(grid_);
  std::unique_ptr<DriveRunner> runner;
  const bool one_layout = paths.size() == 1 && !options_.verify;
  if (one_layout) {
    runner = make_runner(paths, kFirstStripe, options_.verify, target);
    run_points(*runner, points, target);
  } else {
    // A block is a stripe and has one checksum, as in training, so each size has files of its own.
    std::map<uint64_t, std::vector<BenchPoint>> by_block;
    for (const BenchPoint& point : points) by_block[point.block_bytes].push_back(point);
    for (const auto& [block, of_block] : by_block) {
      runner.reset();
      runner = make_runner(paths, block, options_.verify, target);
      run_points(*runner, of_block, target);
    }
  }
  target.best = recommend_alone(target.results);
  if (!one_layout) {
    runner.reset();
    runner = make_runner(paths, target.best.block_bytes, options_.verify, target);
  }
  const std::vector<BenchPoint> mixed = mixed_points(grid_, target.best.block_bytes);
  total_ -= kRounds * (most_mixed_ - mixed.size());
  run_points(*runner, mixed, target);
  recommend_mixed(target.results, target.best);
  compare_nodes(*runner, target);
  runner.reset();
  if (paths.size() == options_.paths.size()) measure_checksums(target);
  return target;
}

}  // namespace

uint64_t bench_page_bytes(uint64_t bytes_per_path) {
  const uint64_t small = bytes_per_path / 8 / kIoAlignment * kIoAlignment;
  return std::clamp<uint64_t>(small, kIoAlignment, kRecordBytes);
}

NvmeBenchReport run_nvme_benchmark(const NvmeBenchOptions& options, const std::atomic<bool>& stop,
                                   const BenchProgress& progress) {
  CHECK(!options.paths.empty());
  if (options.bytes_per_path < 8 * kIoAlignment) {
    fail(ErrorCode::invalid_config, "--size {} is too small; use at least {}",
         format_bytes(options.bytes_per_path), format_bytes(8 * kIoAlignment));
  }
  for (const uint64_t block : options.block_sizes) {
    if (block > 0 && block % kIoAlignment == 0) continue;
    fail(ErrorCode::invalid_config, "--block-size {} is no multiple of {}", block, kIoAlignment);
  }
  check_bench_paths(options.paths, options.bytes_per_path, options.disk_space);
  const Machine machine = read_machine();
  const BenchHost host = describe_bench_host(machine);
  NvmeBenchReport report{.machine = host.machine,
                         .kernel = host.kernel,
                         .started = host.started,
                         .targets = {},
                         .notes = {}};
  if (machine.numa_nodes.size() < 2) {
    report.notes.push_back("one NUMA node: local and remote memory cannot be compared here");
  }
  report.page_bytes = bench_page_bytes(options.bytes_per_path);
  report.seconds_per_point = options.seconds_per_point;
  Sweep sweep(options, stop, progress);
  for (const fs::path& path : options.paths) {
    report.targets.push_back(sweep.measure(path.string(), {path}));
  }
  if (options.paths.size() > 1) {
    report.targets.push_back(
        sweep.measure(fmt::format("all {} paths", options.paths.size()), options.paths));
  }
  for (const TargetResult& target : report.targets) {
    if (target.direct) continue;
    report.notes.push_back(fmt::format(
        "{}: no O_DIRECT on its file system, so these are rates of the page cache, not of a drive; "
        "measure a directory on ext4 or xfs",
        target.name));
  }
  return report;
}

}  // namespace overspill
