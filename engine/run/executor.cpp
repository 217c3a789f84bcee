// Lane threads and their bookkeeping.
#include "engine/run/executor.h"

#include <chrono>
#include <exception>

#include "engine/base/error.h"
#include "engine/base/thread.h"

namespace overspill {
namespace {

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

Executor::Executor(PageStore& store, const Model& model, LaneCpus cpus, const RankGroups& ranks)
    : runner_(store, model, ranks), cpus_(std::move(cpus)) {
  for (size_t lane = 0; lane < kLanes; ++lane) {
    lanes_[lane].thread = std::thread([this, lane] { lane_main(lane); });
  }
}

Executor::~Executor() {
  {
    const std::lock_guard lock(start_mutex_);
    closing_ = true;
  }
  start_.notify_all();
  for (LaneThread& lane : lanes_) lane.thread.join();
}

Trace Executor::run(const Program& program, StepContext& context) {
  Trace trace;
  trace.events.resize(program.ops.size());
  std::unique_lock lock(start_mutex_);
  program_ = &program;
  context_ = &context;
  trace_ = &trace;
  error_ = nullptr;
  stopped_ = false;
  successors_.assign(program.ops.size(), {});
  pending_ = std::make_unique<std::atomic<uint32_t>[]>(program.ops.size());
  for (LaneThread& lane : lanes_) lane.ops.clear();
  for (uint32_t i = 0; i < program.ops.size(); ++i) {
    const Op& op = program.ops[i];
    pending_[i] = op.dep_count;
    for (const OpId dep : program.deps_of(op)) successors_[dep.value].push_back(i);
    lanes_[static_cast<size_t>(op.lane)].ops.push_back(i);
  }
  origin_ns_ = now_ns();
  running_ = kLanes;
  ++generation_;
  start_.notify_all();
  finished_.wait(lock, [&] { return running_ == 0; });
  program_ = nullptr;
  if (error_) std::rethrow_exception(error_);
  return trace;
}

void Executor::lane_main(size_t lane) {
  set_thread_name(lane_name(static_cast<Lane>(lane)));
  const CpuBinding binding(cpus_[lane]);
  uint64_t seen = 0;
  while (true) {
    {
      std::unique_lock lock(start_mutex_);
      start_.wait(lock, [&] { return closing_ || generation_ != seen; });
      if (closing_) return;
      seen = generation_;
    }
    try {
      run_lane(lanes_[lane]);
    } catch (...) {
      stop(std::current_exception());
    }
    const std::lock_guard lock(start_mutex_);
    if (--running_ == 0) finished_.notify_all();
  }
}

void Executor::run_lane(LaneThread& lane) {
  bool begun = false;
  for (size_t i = 0; i < lane.ops.size(); ++i) {
    const uint32_t op = lane.ops[i];
    // What has begun is waited for even when another lane has failed: its memory is in use.
    if (!begun && !wait_for(lane, op)) return;
    Trace::Event& event = trace_->events[op];
    event.begin_ns = now_ns() - origin_ns_;
    if (!begun) runner_.begin(*program_, program_->ops[op]);
    begun = begin_next(lane, i + 1);
    runner_.run(*program_, program_->ops[op], *context_);
    event.end_ns = now_ns() - origin_ns_;
    complete(op);
  }
}

/// Keeps a drive busy over the end of an op: the next one's transfer begins if it can already.
bool Executor::begin_next(const LaneThread& lane, size_t next) {
  return next < lane.ops.size() && !stopped_ && ready(lane.ops[next]) &&
         runner_.begin(*program_, program_->ops[lane.ops[next]]);
}

bool Executor::ready(uint32_t op) const {
  return pending_[op].load(std::memory_order_acquire) == 0;
}

bool Executor::wait_for(LaneThread& lane, uint32_t op) {
  if (stopped_) return false;
  if (ready(op)) return true;
  std::unique_lock lock(lane.mutex);
  lane.ready.wait(lock, [&] { return stopped_ || ready(op); });
  return !stopped_;
}

void Executor::complete(uint32_t op) {
  for (const uint32_t next : successors_[op]) {
    if (pending_[next].fetch_sub(1, std::memory_order_acq_rel) != 1) continue;
    LaneThread& lane = lanes_[static_cast<size_t>(program_->ops[next].lane)];
    // Taking the mutex orders the count with the waiter's check; no wake-up is lost.
    { const std::lock_guard lock(lane.mutex); }
    lane.ready.notify_one();
  }
}

void Executor::stop(std::exception_ptr error) {
  {
    const std::lock_guard lock(start_mutex_);
    if (!error_) error_ = std::move(error);
  }
  stopped_ = true;
  // The other ranks wait for this one, which would wait for them.
  runner_.abort("this rank has stopped by an error of its own");
  for (LaneThread& lane : lanes_) {
    { const std::lock_guard lock(lane.mutex); }
    lane.ready.notify_all();
  }
}

}  // namespace overspill
