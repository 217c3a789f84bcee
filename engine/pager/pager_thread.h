// The thread that pages: takes work in the order in which it was queued, makes one Program of all
// that waits, and runs it on the executor, so that reads, updates and writes of different layers
// overlap. It alone touches homes and the maths of steps. The first error stops it for good.
// add(), wait() and the getters are for any thread.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>

#include "engine/base/log_scope.h"
#include "engine/collective/ranks.h"
#include "engine/model/state_math.h"
#include "engine/pager/memory_uses.h"
#include "engine/plan/fragment_planner.h"
#include "engine/program/fragment_verifier.h"
#include "engine/run/executor.h"
#include "engine/train/checkpoint.h"
#include "engine/train/progress_scope.h"

namespace overspill {

/// How a step is to be updated.
struct StepRates {
  std::vector<double> learning_rates;  ///< by group
  double loss_scale = 1;
};

struct StepReport {
  uint64_t step = 0, updates = 0;
  double gradient_norm = 0, clip_factor = 1;
  bool skipped = false;
};

struct PagerStatistics {
  uint64_t steps = 0, updates = 0, skipped = 0;
  std::array<uint64_t, kLanes> lane_bytes{}, lane_ops{};
  std::array<double, kLanes> lane_seconds{};
};

/// A piece of work, whose parts are used as its kind needs them.
struct PagerWork {
  enum class Kind : uint8_t {
    bring,   ///< a layer's weights, behind its update if that is pending
    update,  ///< the update alone, if it is pending
    finish,  ///< complete gradient sums
    store_sums,
    load_sums,
    begin_step,  ///< whose updates run in the backward
    decide,      ///< ends a step
    task,
  };
  Kind kind;
  uint32_t layer = 0;
  RingPlace place{};
  SlotId sums{};
  StepRates rates{};
  std::vector<char> has_gradient{};  ///< by layer; of decide
  std::function<void()> task{};
  /// On a GPU: of the program's streams, what it begins behind.
  StreamPoints after{};
};

class PagerThread {
 public:
  struct Options {
    double max_grad_norm = 0;
    uint32_t max_non_finite_steps = 3;
    const LogSink* log = nullptr;
    const ProgressObserver* progress = nullptr;
    std::function<void(const std::string&)> warn;
  };
  /// `groups`: what the model's data move over between ranks.
  PagerThread(PageStore& store, const StateMath& state, const Ranks& ranks,
              const RankGroups& groups, Options options);
  /// Does what is queued, unless there was an error, and ends.
  ~PagerThread();

  /// Queues work and returns its ticket; tickets ascend. Throws the first error once there is one.
  uint64_t add(PagerWork work);
  /// Returns when the ticket's work is done; throws the first error.
  void wait(uint64_t ticket);
  bool done(uint64_t ticket);
  /// Waits for a task's end. What it throws is thrown here, and stops nothing.
  void run(std::function<void()> task);
  std::exception_ptr error();
  /// As if the thread had met the error, unless it has met one: it ends with what it is doing.
  void stop(std::exception_ptr error);

  StepReport last_step();
  PagerStatistics statistics();

  // For tasks, and while nothing is queued.
  TrainingPosition& position() { return position_; }
  /// No update is pending; moments are those of `updates` updates in all layers.
  void reset(const TrainingPosition& position);
  /// Writes zero moments where a layer has never been updated, so that all have some.
  void settle_moments();

  void start_trace();
  void write_trace(const std::filesystem::path& path);

 private:
  struct Recorded {
    Program program;
    Trace trace;
    int64_t begin_ns;
  };

  std::exception_ptr tell_ranks(const std::exception_ptr& error) const;
  void main();
  bool take(std::deque<PagerWork>& taken);
  void do_all(const std::deque<PagerWork>& taken);
  bool updates(const PagerWork& work) const;
  bool joins(const PagerWork& work) const;
  void complete(size_t left);
  void plan(const PagerWork& work);
  void begin_behind(const PagerWork& work);
  void run_fragment();
  void begin_step(const PagerWork& work);
  void decide(const PagerWork& work);
  void count_non_finite();
  bool in_backward() const { return layout_.options.update == UpdateTiming::in_backward; }
  void record(Program program, Trace trace, int64_t begin_ns);

  PageStore& store_;
  const Layout& layout_;
  const Ranks& ranks_;
  const Options options_;
  Executor executor_;

  // Of the thread, or of the caller while nothing is queued.
  StepContext context_;
  TrainingPosition position_;
  std::vector<char> pending_;          ///< by layer: its update has yet to be applied
  std::vector<char> moments_zero_;     ///< by layer: it was never updated
  std::optional<bool> fragment_zero_;  ///< of what is planned so far, if it has an update
  std::unique_ptr<FragmentPlanner> fragment_;
  FragmentVerifier verifier_;
  std::vector<uint32_t> finished_;       ///< layers whose gradients are finished, in order
  std::vector<uint32_t> first_updates_;  ///< layers first updated in this step
  uint32_t non_finite_in_row_ = 0;
  double loss_scale_ = 1;

  std::mutex mutex_;
  std::condition_variable wake_, progress_;
  std::deque<PagerWork> queue_;
  uint64_t added_ = 0, completed_ = 0;
  std::exception_ptr error_;
  bool closing_ = false, ended_ = false;
  std::atomic<bool> told_{false};  ///< the other ranks of the error
  StepReport last_step_;
  PagerStatistics statistics_;
  bool tracing_ = false;
  std::vector<Recorded> recorded_;
  size_t recorded_ops_ = 0;
  std::thread thread_;
};

}  // namespace overspill
