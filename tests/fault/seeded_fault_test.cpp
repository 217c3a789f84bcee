// Thousands of small training runs with all state on NVMe, below which something goes wrong, drawn
// from a seed: late, reordered, short, torn, misdirected, flipped, failing, stuck requests. Every
// run ends with the bits of the undisturbed run or in one clean Error. OVERSPILL_FAULT_SEEDS=N runs
// N seeds, OVERSPILL_FAULT_FIRST_SEED=K starts at the K-th, as a failure prints it.
#include <gtest/gtest.h>
#include <pthread.h>
#include <stdlib.h>

#include <cerrno>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <mutex>
#include <thread>

#include "engine/base/error.h"
#include "engine/base/log.h"
#include "engine/base/random.h"
#include "engine/model/host_state_math.h"
#include "engine/model/llama.h"
#include "engine/plan/planner.h"
#include "engine/run/executor.h"
#include "engine/train/model_state.h"
#include "tests/unit/engine/plan/test_models.h"

namespace overspill {
namespace {

namespace fs = std::filesystem;
using std::chrono::milliseconds;

/// Ends the process, naming the seed, when a run does not come back.
class Watchdog {
 public:
  Watchdog() : thread_([this] { watch(); }) {}
  ~Watchdog() {
    {
      const std::lock_guard lock(mutex_);
      done_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  void begin(uint64_t seed) {
    const std::lock_guard lock(mutex_);
    seed_ = seed;
    since_ = std::chrono::steady_clock::now();
  }

 private:
  void watch() {
    std::unique_lock lock(mutex_);
    while (!changed_.wait_for(lock, milliseconds(500), [this] { return done_; })) {
      if (std::chrono::steady_clock::now() - since_ < std::chrono::seconds(60)) continue;
      std::fprintf(stderr, "seed %llu hangs\n", static_cast<unsigned long long>(seed_));
      std::abort();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t seed_ = 0;
  std::chrono::steady_clock::time_point since_ = std::chrono::steady_clock::now();
  bool done_ = false;
  std::thread thread_;
};

/// What a run leaves: losses, norms, and every weight and optimizer page.
struct Outcome {
  std::vector<double> numbers;
  std::vector<std::byte> state;
  bool operator==(const Outcome&) const = default;
};

class SeededFaults : public testing::Test {
 protected:
  static constexpr uint32_t kBatches = 2;

  void SetUp() override {
    set_log_level(LogLevel::off);
    // Memory where there is some: these runs test our handling of faults, not the disk.
    const fs::path shared = "/dev/shm";
    const fs::path parent = fs::exists(shared) ? shared : fs::temp_directory_path();
    std::string name = parent / "overspill-seeded-XXXXXX";
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    root_ = name;
    model_ = test::tiny_model(false, 1);
    for (size_t i = 0; i < 64; ++i) {
      tokens_.push_back(static_cast<int32_t>(random_below(1, i, model_.config.vocab_size)));
      targets_.push_back(static_cast<int32_t>(random_below(2, i, model_.config.vocab_size)));
    }
    const Llama llama(model_, DType::bf16, {2, 16}, host_kernels());
    PlanOptions o = test::roomy_options();
    o.compute_scratch_bytes = llama.scratch_bytes();
    o.unified = false;
    o.device_memory = o.host_memory = 4 * kMiB;
    o.weights = o.optimizer = o.gradients = o.activations = Placement::nvme;
    layout_ = plan_layout(model_, o);
    programs_ = {plan_step(layout_, {true, true, false, false, kBatches}),
                 plan_step(layout_, {true, true, true, true, kBatches}),
                 plan_step(layout_, {false, false, true, false, kBatches})};
    draw_start();
  }
  /// Draws the weights once; runs copy them.
  void draw_start() {
    PageStore store(layout_, {{root_}, {}});
    initialize_weights(store, 3);
    for (uint32_t i = 0; i < layout_.pages.size(); ++i) {
      if (start_bytes({i}) == 0) continue;
      const std::span<std::byte> page = store.load({i}, start_bytes({i}));
      start_.emplace_back(page.begin(), page.end());
    }
  }
  /// Bytes of a page that are there before the first step: weights and remainders.
  uint64_t start_bytes(PageId id) const {
    const Page& page = layout_.page(id);
    if (page.kind == PageKind::weight) return page.bytes;
    if (page.kind != PageKind::optimizer) return 0;
    return layout_.state(layout_.chunk(page.layer, page.index)).remainder_bytes();
  }
  void store_start(PageStore& store) const {
    size_t next = 0;
    for (uint32_t i = 0; i < layout_.pages.size(); ++i) {
      if (start_bytes({i}) == 0) continue;
      const std::vector<std::byte>& bytes = start_[next++];
      std::ranges::copy(bytes, store.buffer({i}).begin());
      store.store({i}, bytes.size());
    }
  }
  void TearDown() override {
    fs::remove_all(root_);
    set_log_level(LogLevel::info);
  }

  /// Two steps and the flush of the second update.
  Outcome run(const IoOptions& io) const {
    PageStore store(layout_, {{root_}, io});
    Llama llama(model_, DType::bf16, {2, 16}, host_kernels());
    llama.set_scratch(store.address(layout_.scratch));
    store_start(store);
    const HostStateMath state(model_, host_kernels());
    Executor executor(store, state, &llama);
    Outcome outcome;
    StepContext context;
    context.tokens = tokens_;
    context.targets = targets_;
    context.loss_scale = 1.0f / 64;
    for (size_t step = 0; step < programs_.size(); ++step) {
      context.losses.assign(kBatches, 0);
      context.gradient_squares.assign(model_.layers.size(), 0);
      OptimizerSettings rule = layout_.options.update_rule();
      rule.weight_decay = 0.01;
      const double rates[] = {1e-2};
      context.update = update_step(rule, rates, std::max<size_t>(step, 1), 1.0);
      executor.run(programs_[step], context);
      for (const double x : context.losses) outcome.numbers.push_back(x);
      for (const double x : context.gradient_squares) outcome.numbers.push_back(x);
    }
    for (uint32_t i = 0; i < layout_.pages.size(); ++i) {
      const PageKind kind = layout_.pages[i].kind;
      if (kind != PageKind::weight && kind != PageKind::optimizer) continue;
      const std::span<std::byte> page = store.load({i});
      outcome.state.insert(outcome.state.end(), page.begin(), page.end());
    }
    return outcome;
  }

  fs::path root_;
  ModelShape model_;
  Layout layout_;
  std::vector<Program> programs_;
  std::vector<std::vector<std::byte>> start_;  // per page that is there before the first step
  std::vector<int32_t> tokens_, targets_;
};

/// What one seed stands for.
struct Scenario {
  explicit Scenario(uint64_t seed);
  IoOptions io() const;

  uint64_t seed;
  FaultPlan plan;
  const char* thread = nullptr;  ///< the thread whose channel is faulty; null: the main one
  IoBackend backend;
  uint64_t block_bytes;
  bool stuck = false;
  std::string text;
};

Scenario::Scenario(uint64_t the_seed) : seed(the_seed) {
  uint64_t draws = 0;
  const auto draw = [&](uint64_t below) { return random_below(seed + 77, draws++, below); };
  constexpr std::array<const char*, 3> kThreads = {nullptr, "nvme_read", "nvme_write"};
  constexpr std::array<int, 6> kErrors = {EIO, EIO, EAGAIN, ENOSPC, ENODEV, ESTALE};
  constexpr std::array<uint64_t, 3> kBlocks = {4096, 16384, 1 << 20};
  thread = kThreads[draw(3)];
  constexpr std::array<IoBackend, 3> kBackends = {IoBackend::automatic, IoBackend::threads,
                                                  IoBackend::memory};
  backend = kBackends[draw(3)];
  block_bytes = kBlocks[draw(3)];
  plan.seed = seed;
  plan.reorder = draw(2) == 0;
  if (draw(8) == 0) plan.latency = std::chrono::microseconds(200);
  const uint64_t requests = block_bytes == 4096 ? 600 : block_bytes == 16384 ? 200 : 40;
  for (uint64_t i = draw(4); i < 3; ++i) {
    Fault fault;
    fault.kind = static_cast<FaultKind>(draw(6));
    if (fault.kind == FaultKind::stuck && draw(4) != 0) fault.kind = FaultKind::bit_flip;
    fault.request = draw(requests);
    fault.times = 1 + draw(3);
    fault.error = kErrors[draw(kErrors.size())];
    fault.distance = (static_cast<int64_t>(draw(129)) - 64) * 4096;
    stuck = stuck || fault.kind == FaultKind::stuck;
    text +=
        fmt::format(" kind {} at {} x{}", static_cast<int>(fault.kind), fault.request, fault.times);
    plan.faults.push_back(fault);
  }
}

IoOptions Scenario::io() const {
  IoOptions io;
  io.backend = backend;
  if (backend == IoBackend::memory) io.memory_files = make_memory_files();
  io.block_size = block_bytes;
  io.queue_depth = 4;
  if (stuck) io.timeout = milliseconds(40);
  io.wrap = [plan = plan, thread = thread](std::unique_ptr<AsyncIo> inner) {
    std::array<char, 16> name{};
    pthread_getname_np(pthread_self(), name.data(), name.size());
    const std::string own = name.data();
    const bool lane = own == "nvme_read" || own == "nvme_write";
    const bool faulty = thread == nullptr ? !lane : own == thread;
    return faulty ? make_faulty_io(std::move(inner), plan) : std::move(inner);
  };
  return io;
}

uint64_t number_from(const char* variable, uint64_t otherwise) {
  const char* const text = std::getenv(variable);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

TEST_F(SeededFaults, EveryRunEndsWithTheSameBitsOrOneCleanError) {
  const Outcome reference = run({});
  ASSERT_FALSE(reference.state.empty());
  const uint64_t first = number_from("OVERSPILL_FAULT_FIRST_SEED", 0);
  const uint64_t count = number_from("OVERSPILL_FAULT_SEEDS", 2000);
  uint64_t same = 0, errors = 0, rotten = 0;
  Watchdog watchdog;
  for (uint64_t seed = first; seed < first + count; ++seed) {
    const Scenario scenario(seed);
    SCOPED_TRACE(fmt::format("seed {}:{}", seed, scenario.text));
    watchdog.begin(seed);
    try {
      const Outcome outcome = run(scenario.io());
      ASSERT_TRUE(outcome == reference) << "wrong bits";
      ++same;
    } catch (const Error& error) {
      const std::string text = error.what();
      ++errors;
      rotten += text.find("checksum") != std::string::npos;
      ASSERT_EQ(error.code(), ErrorCode::io) << text;
      ASSERT_FALSE(scenario.plan.faults.empty()) << text;
      ASSERT_NE(text.find("then resume from the last checkpoint"), std::string::npos) << text;
      ASSERT_NE(text.find("of layer "), std::string::npos) << text;  // names the page
      ASSERT_EQ(text.find("report this bug"), std::string::npos) << text;
    }
    ASSERT_TRUE(fs::is_empty(root_)) << "swap files are left";
  }
  std::printf("%llu runs with the same bits, %llu errors, %llu of them checksums\n",
              static_cast<unsigned long long>(same), static_cast<unsigned long long>(errors),
              static_cast<unsigned long long>(rotten));
  if (count >= 1000) {
    EXPECT_GT(same, count / 5);
    EXPECT_GT(errors, count / 5);
    EXPECT_GT(rotten, count / 50);
  }
}

}  // namespace
}  // namespace overspill
