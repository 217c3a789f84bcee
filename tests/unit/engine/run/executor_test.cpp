// The executor on real Programs of a small model: order under random delays, lanes at the same
// time, errors, and use after an error.
#include "engine/run/executor.h"
#include "engine/model/host_state_math.h"
#include "engine/model/llama.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <thread>

#include "engine/base/error.h"
#include "engine/base/random.h"
#include "engine/plan/planner.h"
#include "engine/program/verify.h"
#include "engine/train/model_state.h"
#include "tests/unit/engine/base/parallel_groups.h"
#include "tests/unit/engine/plan/test_models.h"

namespace overspill {
namespace {

namespace fs = std::filesystem;

/// What the wrapped kernels and I/O do; reset by each test.
struct Mischief {
  std::atomic<uint32_t> longest_delay_us{0};
  std::atomic<int64_t> kernel_calls_left{INT64_MAX};  ///< the call after them throws
  std::atomic<bool> io_broken{false};
  std::atomic<uint64_t> random{0};
  // Which CPU runs kernels and which waits for drives; -1: any.
  std::atomic<int> compute_cpu{-1}, io_cpu{-1};
  std::atomic<uint32_t> strays{0};
  std::atomic<uint32_t> overlaps{0};  ///< submits while requests were in flight

  void check_place(int cpu) {
    if (cpu >= 0 && sched_getcpu() != cpu) ++strays;
  }
  void delay() {
    const uint32_t longest = longest_delay_us;
    if (longest == 0) return;
    const uint64_t us = random_below(11, random.fetch_add(1), longest);
    std::this_thread::sleep_for(std::chrono::microseconds(us));
  }
};
Mischief mischief;

void slow_norm(const float* x, WeightView w, float eps, float* y, float* rstd, uint64_t rows,
               uint64_t d) {
  mischief.delay();
  mischief.check_place(mischief.compute_cpu);
  if (mischief.kernel_calls_left.fetch_sub(1) == 0) fail(ErrorCode::internal, "norm refused");
  host_kernels().rms_norm(x, w, eps, y, rstd, rows, d);
}

const Kernels& slow_kernels() {
  static const Kernels table = [] {
    Kernels k = host_kernels();
    k.rms_norm = slow_norm;
    return k;
  }();
  return table;
}

class SlowIo : public AsyncIo {
 public:
  explicit SlowIo(std::unique_ptr<AsyncIo> inner) : inner_(std::move(inner)) {}
  const char* name() const override { return inner_->name(); }
  uint32_t depth() const override { return inner_->depth(); }
  void submit(std::span<const IoRequest> requests) override {
    if (in_flight_ > 0) ++mischief.overlaps;
    in_flight_ += requests.size();
    inner_->submit(requests);
  }
  void cancel() override { inner_->cancel(); }
  size_t reap(std::span<IoResult> results, std::chrono::milliseconds timeout) override {
    mischief.delay();
    mischief.check_place(mischief.io_cpu);
    const size_t count = inner_->reap(results, timeout);
    in_flight_ -= count;
    if (mischief.io_broken) {
      for (IoResult& result : results.first(count)) result = {result.tag, 0, EIO};
    }
    return count;
  }

 private:
  std::unique_ptr<AsyncIo> inner_;
  size_t in_flight_ = 0;
};

/// A small model with all its state on NVMe behind a discrete device, ready to run.
struct Machine {
  explicit Machine(const fs::path& directory)
      : llama(model, DType::bf16, {2, 16}, slow_kernels()),
        layout(plan_layout(model, options(llama))),
        store(layout, {{directory}, io()}),
        state(model, slow_kernels()),
        executor(store, state, &llama) {
    llama.set_scratch(store.address(layout.scratch));
    initialize_weights(store, 3);
    program = plan_step(layout, {true, true, false, false, 2});
    verify_program(program, layout);
    for (size_t i = 0; i < 64; ++i) {
      tokens.push_back(static_cast<int32_t>(random_below(1, i, model.config.vocab_size)));
      targets.push_back(static_cast<int32_t>(random_below(2, i, model.config.vocab_size)));
    }
  }
  static PlanOptions options(const Llama& llama) {
    PlanOptions o = test::roomy_options();
    o.compute_scratch_bytes = llama.scratch_bytes();
    o.unified = false;
    o.weights = o.optimizer = o.gradients = o.activations = Placement::nvme;
    o.prefetch_depth = 1;
    return o;
  }
  static IoOptions io() {
    IoOptions o;
    o.wrap = [](std::unique_ptr<AsyncIo> inner) {
      return std::make_unique<SlowIo>(std::move(inner));
    };
    return o;
  }
  Trace run() {
    context.tokens = tokens;
    context.targets = targets;
    context.loss_scale = 1.0f / 64;
    context.losses.assign(2, NAN);
    context.gradient_squares.assign(model.layers.size(), NAN);
    context.non_finite = false;
    return executor.run(program, context);
  }
  std::vector<double> results() const {
    std::vector<double> all = context.losses;
    all.insert(all.end(), context.gradient_squares.begin(), context.gradient_squares.end());
    return all;
  }

  ModelShape model = test::tiny_model(true);
  Llama llama;
  Layout layout;
  PageStore store;
  HostStateMath state;
  Executor executor;
  Program program;
  std::vector<int32_t> tokens, targets;
  StepContext context;
};

class ExecutorTest : public testing::Test {
 protected:
  void SetUp() override {
    mischief.longest_delay_us = 0;
    mischief.kernel_calls_left = INT64_MAX;
    mischief.io_broken = false;
    std::string name = (fs::temp_directory_path() / "overspill_executor_XXXXXX").string();
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    directory_ = name;
    machine_ = std::make_unique<Machine>(directory_);
  }
  void TearDown() override {
    machine_.reset();
    fs::remove_all(directory_);
  }
  std::string error_of_run() {
    try {
      machine_->run();
    } catch (const Error& error) {
      return error.what();
    }
    return "no error";
  }

  fs::path directory_;
  std::unique_ptr<Machine> machine_;
};

void expect_order(const Program& program, const Trace& trace) {
  ASSERT_EQ(trace.events.size(), program.ops.size());
  std::array<int64_t, kLanes> lane_end{};
  for (size_t i = 0; i < program.ops.size(); ++i) {
    const Op& op = program.ops[i];
    const Trace::Event& event = trace.events[i];
    ASSERT_GE(event.end_ns, event.begin_ns) << "op " << i;
    int64_t& end = lane_end[static_cast<size_t>(op.lane)];
    ASSERT_GE(event.begin_ns, end) << "op " << i << " overtook its lane";
    end = event.end_ns;
    for (const OpId dep : program.deps_of(op)) {
      ASSERT_GE(event.begin_ns, trace.events[dep.value].end_ns)
          << "op " << i << " began before op " << dep.value << " had finished";
    }
  }
}

TEST_F(ExecutorTest, RunsAProgramToItsEnd) {
  const Trace trace = machine_->run();
  expect_order(machine_->program, trace);
  for (const Trace::Event& event : trace.events) EXPECT_GT(event.end_ns, 0);
  for (const double result : machine_->results()) EXPECT_TRUE(std::isfinite(result));
  // Random weights know nothing: the loss is near log(vocabulary) a token.
  EXPECT_NEAR(machine_->context.losses[0] / 32, std::log(300.0), 0.3);
  EXPECT_FALSE(machine_->context.non_finite);
}

TEST_F(ExecutorTest, ATransferBeginsWhileTheOneBeforeItIsUnderWay) {
  mischief.overlaps = 0;  // an op's pages are few requests, submitted together
  machine_->run();
  EXPECT_GT(mischief.overlaps, 0u);
}

TEST_F(ExecutorTest, ATransferWaitsForTheOneWhosePagesItShares) {
  const Program& program = machine_->program;
  const auto is_read = [](const Op& op) { return op.kind == OpKind::read; };
  const auto first = std::ranges::find_if(program.ops, is_read);
  const auto second = std::find_if(first + 1, program.ops.end(), is_read);
  ASSERT_NE(second, program.ops.end());
  OpRunner runner(machine_->store, machine_->state, &machine_->llama);
  EXPECT_TRUE(runner.begin(program, *first));
  EXPECT_FALSE(runner.begin(program, *first));
  EXPECT_TRUE(runner.begin(program, *second));
  runner.run(program, *first, machine_->context);
  EXPECT_TRUE(runner.begin(program, *first));
  runner.run(program, *second, machine_->context);
  runner.run(program, *first, machine_->context);
}

TEST_F(ExecutorTest, KeepsOrderAndResultsUnderRandomDelays) {
  machine_->run();
  const std::vector<double> want = machine_->results();
  mischief.longest_delay_us = 400;
  for (int round = 0; round < 8; ++round) {
    expect_order(machine_->program, machine_->run());
    EXPECT_EQ(machine_->results(), want) << "round " << round;
  }
}

TEST_F(ExecutorTest, ManyRunsLoseNoWakeUp) {
  machine_->run();
  const std::vector<double> want = machine_->results();
  for (int round = 0; round < 30; ++round) {
    machine_->run();
    ASSERT_EQ(machine_->results(), want) << "round " << round;
  }
}

TEST_F(ExecutorTest, LanesRunAtTheSameTime) {
  mischief.longest_delay_us = 500;
  const Trace trace = machine_->run();
  size_t overlaps = 0;
  for (size_t a = 0; a < trace.events.size(); ++a) {
    for (size_t b = 0; b < a; ++b) {
      overlaps += trace.events[a].begin_ns < trace.events[b].end_ns &&
                  trace.events[b].begin_ns < trace.events[a].end_ns;
    }
  }
  EXPECT_GT(overlaps, 0u);
}

TEST_F(ExecutorTest, LanesKeepToTheirCpus) {
  const std::vector<uint32_t> cpus = test::cpus_of_thread();
  if (cpus.size() < 2) GTEST_SKIP() << "this process may use only one CPU";
  machine_->run();
  const std::vector<double> want = machine_->results();
  LaneCpus lanes;
  lanes.fill({cpus[1]});
  lanes[static_cast<size_t>(Lane::nvme_read)] =
      lanes[static_cast<size_t>(Lane::nvme_write)] = {cpus[0]};
  Executor executor(machine_->store, machine_->state, &machine_->llama, lanes);
  mischief.io_cpu = static_cast<int>(cpus[0]);
  mischief.compute_cpu = static_cast<int>(cpus[1]);
  executor.run(machine_->program, machine_->context);
  mischief.io_cpu = mischief.compute_cpu = -1;
  EXPECT_EQ(mischief.strays, 0u);
  EXPECT_EQ(machine_->results(), want);
}

TEST_F(ExecutorTest, EmptyProgramEnds) {
  StepContext context;
  EXPECT_TRUE(machine_->executor.run(Program{}, context).events.empty());
}

TEST_F(ExecutorTest, ErrorOfAnOpStopsTheRunAndTheNextRunIsWhole) {
  machine_->run();
  const std::vector<double> want = machine_->results();
  size_t failures = 0;
  for (int64_t call = 0;; call += 3) {
    mischief.kernel_calls_left = call;
    mischief.longest_delay_us = 100;
    const std::string message = error_of_run();
    const bool fell = mischief.kernel_calls_left < 0;
    mischief.kernel_calls_left = INT64_MAX;
    if (!fell) break;
    ++failures;
    EXPECT_EQ(message, "norm refused");
    EXPECT_EQ(error_of_run(), "no error") << "after call " << call;
    ASSERT_EQ(machine_->results(), want) << "after call " << call;
  }
  EXPECT_GT(failures, 5u);
}

TEST_F(ExecutorTest, IoErrorNamesThePageAndTheNextRunIsWhole) {
  machine_->run();
  const std::vector<double> want = machine_->results();
  mischief.io_broken = true;
  const std::string message = error_of_run();
  EXPECT_NE(message.find("Input/output error"), std::string::npos) << message;
  EXPECT_NE(message.find("layer"), std::string::npos) << message;
  mischief.io_broken = false;
  EXPECT_EQ(error_of_run(), "no error");
  EXPECT_EQ(machine_->results(), want);
}

TEST_F(ExecutorTest, EndsWhileIdleOrAfterAnError) {
  mischief.io_broken = true;
  EXPECT_NE(error_of_run(), "no error");
  machine_.reset();  // must not hang
}

}  // namespace
}  // namespace overspill
