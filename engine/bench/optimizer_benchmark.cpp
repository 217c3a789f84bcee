// Chunks' weights, gradients and states lie in arenas, as slots do. Weights and gradients are
// random and serve all rules in turn.
#include "engine/bench/optimizer_benchmark.h"

#include <fmt/format.h>

#include <algorithm>

#include "engine/base/error.h"
#include "engine/base/parallel.h"
#include "engine/model/kernels.h"

namespace overspill {
namespace {

constexpr uint64_t kColumns = 2048;         // of a chunk as adafactor's matrix
constexpr uint64_t kSmallChunk = 4096;      // in the caches, of which an update is all latency
constexpr uint64_t kStateBytesAtMost = 10;  // per parameter: adamw, float32, with the remainder

/// Restores the process's groups of threads.
class GroupsScope {
 public:
  GroupsScope() {
    for (uint32_t i = 0; i < parallel_group_count(); ++i) groups_.push_back(parallel_group(i));
  }
  ~GroupsScope() { set_parallel_groups(groups_); }
  GroupsScope(const GroupsScope&) = delete;
  GroupsScope& operator=(const GroupsScope&) = delete;

 private:
  std::vector<ParallelGroup> groups_;
};

std::vector<OptimizerSettings> rules() {
  using enum OptimizerKind;
  using enum StateFormat;
  constexpr std::pair<OptimizerKind, StateFormat> kRules[] = {
      {adamw, float32}, {adamw, bfloat16}, {adamw, int8},       {lion, bfloat16},
      {lion, int8},     {sgd, float32},    {adafactor, float32}};
  std::vector<OptimizerSettings> result;
  for (const auto& [kind, state] : kRules) {
    result.push_back({.kind = kind, .state = state, .weight_decay = 0.1});
  }
  return result;
}

}  // namespace

UpdateWorks::UpdateWorks(const OptimizerBenchOptions& options)
    : chunk_(options.chunk_parameters),
      chunks_(std::max<uint64_t>(1, options.parameters / options.chunk_parameters)),
      weights_(2 * chunk_ * chunks_, "weights"),
      gradients_(2 * chunk_ * chunks_, "gradients"),
      states_(kStateBytesAtMost * chunk_ * chunks_, "optimizer states"),
      sums_(sizeof(float) * chunk_ * chunks_, "gradient sums"),
      averages_(chunk_ / kColumns + kColumns + 1, 1e-6f) {
  CHECK(chunk_ % kSmallChunk == 0);
  const uint64_t parameters = chunk_ * chunks_;
  fill_bf16(reinterpret_cast<uint16_t*>(weights_.memory()), parameters, 0.02f);
  fill_bf16(reinterpret_cast<uint16_t*>(gradients_.memory()), parameters, 1e-3f);
  fill_floats(reinterpret_cast<float*>(sums_.memory()), parameters, 1e-3f);
}

UpdateWorks::Buffers UpdateWorks::buffers() const {
  return {weights_.memory(), gradients_.memory(), states_.memory(),
          reinterpret_cast<float*>(sums_.memory()), averages_.data()};
}

void UpdateWorks::update_one(const Buffers& b, const OptimizerSettings& rule, uint64_t chunk,
                             uint64_t room, uint64_t parameters, uint64_t step) {
  constexpr double kRate[] = {1e-6};  // small: weights stay as they are over many steps
  const uint64_t first = chunk * room;
  UpdateRun run{.begin = 0, .end = parameters};
  run.matrix = {.rows = parameters / kColumns, .columns = kColumns};
  update_chunk(rule, update_step(rule, kRate, step, 1.0),
               {.weight = b.weights + 2 * first,
                .state = b.states + kStateBytesAtMost * first,
                .gradient = b.gradients + 2 * first,
                .parameters = parameters,
                .exact = 0,
                .layer = 0,
                .first = first,
                .averages = b.averages},
               {&run, 1}, /*moments_zero=*/step == 1);
}

BenchWork UpdateWorks::update(const OptimizerSettings& rule, uint64_t parameters) const {
  CHECK(parameters <= chunk_);
  return {static_cast<double>(parameters),
          [=, b = buffers(), room = chunk_, chunks = chunks_, turn = uint64_t{0}]() mutable {
            update_one(b, rule, turn % chunks, room, parameters, 2 + turn / chunks);
            ++turn;
          }};
}

std::function<void()> UpdateWorks::first_step(const OptimizerSettings& rule) const {
  return [=, b = buffers(), room = chunk_, chunks = chunks_] {
    for (uint64_t chunk = 0; chunk < chunks; ++chunk) update_one(b, rule, chunk, room, room, 1);
  };
}

BenchWork UpdateWorks::reduce_gradient() const {
  return {static_cast<double>(chunk_),
          [b = buffers(), size = chunk_, chunks = chunks_, turn = uint64_t{0}]() mutable {
            host_kernels().sum_of_squares(b.sums + turn++ % chunks * size, size);
          }};
}

BenchWork UpdateWorks::export_gradient() const {
  return {static_cast<double>(chunk_),
          [b = buffers(), size = chunk_, chunks = chunks_, turn = uint64_t{0}]() mutable {
            const uint64_t first = turn++ % chunks * size;
            host_kernels().float_to_bf16(b.sums + first,
                                         reinterpret_cast<uint16_t*>(b.gradients) + first, size);
          }};
}

OptimizerReport run_optimizer_benchmark(const OptimizerBenchOptions& options,
                                        const std::atomic<bool>& stop,
                                        const BenchProgress& progress) {
  choose_run_groups(read_machine());
  OptimizerReport report;
  report.chunk_parameters = options.chunk_parameters;
  report.threads = parallel_threads();
  const std::vector<uint32_t> counts = thread_counts(report.threads);
  const UpdateWorks works(options);
  std::vector<BenchTask> tasks;
  for (const OptimizerSettings& rule : rules()) {
    tasks.push_back({.name = rule_name(rule.kind, rule.state),
                     .unit = "G parameters/s",
                     .works = {works.update(rule, options.chunk_parameters)},
                     .prepare = works.first_step(rule)});
    report.updates.push_back({rule.kind, rule.state, 0});
  }
  const OptimizerSettings usual = rules().front();
  tasks.push_back({.name = "a small chunk",
                   .unit = "G parameters/s",
                   .works = {works.update(usual, kSmallChunk)},
                   .prepare = works.first_step(usual)});
  tasks.push_back({"sum of squares", "G elements/s", {works.reduce_gradient()}});
  tasks.push_back({"gradients to bf16", "G elements/s", {works.export_gradient()}});
  BenchRounds rounds(options.rounds, tasks.size() + counts.size() - 1, stop, progress);
  const auto rates = rounds.measure(tasks);
  const size_t small = report.updates.size();
  for (size_t i = 0; i < small; ++i) report.updates[i].parameters_per_second = rates[i][0];
  report.update_latency = kSmallChunk / rates[small][0];
  report.reduce_gradient = rates[small + 1][0];
  report.export_gradient = rates[small + 2][0];

  const GroupsScope groups;
  for (const uint32_t threads : counts) {
    if (threads == report.threads) break;
    set_parallel_threads(threads);
    const BenchTask task{.name = fmt::format("{} of {} threads", threads, report.threads),
                         .unit = "G parameters/s",
                         .works = {works.update(usual, options.chunk_parameters)},
                         .prepare = works.first_step(usual)};
    report.scaling.push_back({threads, rounds.measure({&task, 1})[0][0]});
  }
  report.scaling.push_back({report.threads, rates.front()[0]});
  return report;
}

std::vector<uint32_t> thread_counts(uint32_t threads) {
  std::vector<uint32_t> counts;
  for (uint32_t count = 1; count < threads; count *= 2) counts.push_back(count);
  counts.push_back(threads);
  return counts;
}

}  // namespace overspill
