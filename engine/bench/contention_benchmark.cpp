// Every round measures each work alone and each pair, so that ratios compare like with like.
#include "engine/bench/contention_benchmark.h"

#include <fmt/format.h>

#include <memory>

#include "engine/bench/drive_runner.h"
#include "engine/bench/nvme_benchmark.h"

namespace overspill {
namespace {

constexpr uint32_t kPagesInMemory = 4, kPagesPerCall = 4;

/// Reads pages from the drives; amount: bytes.
class ReadWorks {
 public:
  ReadWorks(const ContentionBenchOptions& options, const std::atomic<bool>& stop)
      : buffers_(bench_page_bytes(options.bytes_per_path), kPagesInMemory),
        runner_({.directories = options.paths,
                 .bytes_per_drive = options.bytes_per_path,
                 .stripe_bytes = std::min(options.drives.block_bytes, buffers_.page_bytes),
                 .verify = true,
                 .io = {},
                 .stop = &stop},
                buffers_),
        point_{.traffic = Traffic::read,
               .order = PageOrder::random,
               .block_bytes = std::min(options.drives.block_bytes, buffers_.page_bytes),
               .read_depth = options.drives.read_depth} {
    runner_.write_first();
  }
  BenchWork work() {
    const uint64_t bytes = kPagesPerCall * buffers_.page_bytes;
    return {static_cast<double>(bytes), [this, bytes] { runner_.run(point_, {.bytes = bytes}); }};
  }

 private:
  BenchBuffers buffers_;
  DriveRunner runner_;
  BenchPoint point_;
};

}  // namespace

ContentionReport run_contention_benchmark(const ContentionBenchOptions& options,
                                          const std::atomic<bool>& stop,
                                          const BenchProgress& progress) {
  choose_run_groups(read_machine());
  if (!options.paths.empty()) check_bench_paths(options.paths, options.bytes_per_path);
  const ComputeWorks compute(options.compute);
  const UpdateWorks updates(options.optimizer);
  const BenchTask forward = compute.task(OpKind::forward, options.compute.hidden_sizes.front(),
                                         options.compute.tokens.front());
  const OptimizerSettings rule;
  forward.prepare();
  updates.first_step(rule)();
  std::unique_ptr<ReadWorks> reads;
  std::vector<BenchTask> tasks = {
      {"forward", "GFLOP/s", forward.works},
      {"update", "G parameters/s", {updates.update(rule, options.optimizer.chunk_parameters)}}};
  if (!options.paths.empty()) {
    reads = std::make_unique<ReadWorks>(options, stop);
    tasks.push_back({"read", "GB/s", {reads->work()}});
  }
  const size_t alone = tasks.size();
  ContentionReport report;
  for (size_t a = 0; a < alone; ++a) {
    for (size_t b = a + 1; b < alone; ++b) {
      report.pairs.push_back({tasks[a].name, tasks[b].name, 0, 0});
      tasks.push_back({fmt::format("{} beside {}", tasks[a].name, tasks[b].name),
                       tasks[a].unit + " + " + tasks[b].unit,
                       {tasks[a].works.front(), tasks[b].works.front()}});
    }
  }
  BenchRounds rounds(options.rounds, tasks.size(), stop, progress);
  const auto rates = rounds.measure(tasks);
  size_t next = 0;
  for (size_t a = 0; a < alone; ++a) {
    for (size_t b = a + 1; b < alone; ++b, ++next) {
      ContentionPair& pair = report.pairs[next];
      pair.first_part = rates[alone + next][0] / rates[a][0];
      pair.second_part = rates[alone + next][1] / rates[b][0];
    }
  }
  return report;
}

BenchSection contention_section(const ContentionReport& report) {
  BenchTable table{
      .title = "two at once, parts of each one's rate alone (1 + 1: nothing is shared)",
      .columns = {"pair", "first", "second", "sum"},
      .rows = {}};
  nlohmann::ordered_json pairs = nlohmann::ordered_json::array();
  for (const ContentionPair& pair : report.pairs) {
    table.rows.push_back({fmt::format("{} beside {}", pair.first, pair.second),
                          fmt::format("{:.2f}", pair.first_part),
                          fmt::format("{:.2f}", pair.second_part),
                          fmt::format("{:.2f}", pair.first_part + pair.second_part)});
    pairs.push_back({{"first", pair.first},
                     {"second", pair.second},
                     {"first_part", pair.first_part},
                     {"second_part", pair.second_part}});
  }
  return make_section("contention", "Lanes beside each other", {&table, 1}, {}, {},
                      {{"pairs", pairs}});
}

}  // namespace overspill
