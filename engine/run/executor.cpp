// Lane threads and their bookkeeping.
#include "engine/run/executor.h"

#include <algorithm>
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

Executor::Executor(PageStore& store, const StateMath& state, const Model* layers, LaneCpus cpus,
                   const RankGroups& ranks)
    : runner_(store, state, layers, ranks), cpus_(std::move(cpus)) {
  try {
    start_lanes();
  } catch (...) {
    end_lanes();  // those that have started
    throw;
  }
}

void Executor::start_lanes() {
  for (size_t i = 0; i < kLanes; ++i) {
    LaneThread& lane = lanes_[i];
    lane.stream = runner_.stream_of(static_cast<Lane>(i));
    const LaneWork work = lane.stream ? &Executor::put_lane : &Executor::run_lane;
    lane.thread = std::thread([this, i, work] { lane_main(i, work); });
    ++threads_;
    if (!lane.stream) continue;
    for (std::unique_ptr<DeviceEvent>& event : lane.events) event = runner_.device().make_event();
    lane.finisher = std::thread([this, i] { lane_main(i, &Executor::finish_lane); });
    ++threads_;
  }
}

Executor::~Executor() { end_lanes(); }

void Executor::end_lanes() {
  {
    const std::lock_guard lock(start_mutex_);
    closing_ = true;
  }
  start_.notify_all();
  for (LaneThread& lane : lanes_) {
    if (lane.thread.joinable()) lane.thread.join();
    if (lane.finisher.joinable()) lane.finisher.join();
  }
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
  for (LaneThread& lane : lanes_) {
    lane.ops.clear();
    lane.put = lane.finished = 0;
    lane.all_put = false;
    if (lane.stream) lane.positions.assign(program.ops.size(), 0);
  }
  for (uint32_t i = 0; i < program.ops.size(); ++i) {
    const Op& op = program.ops[i];
    pending_[i] = op.dep_count;
    for (const OpId dep : program.deps_of(op)) successors_[dep.value].push_back(i);
    LaneThread& lane = lanes_[static_cast<size_t>(op.lane)];
    if (lane.stream) lane.positions[i] = lane.ops.size();
    lane.ops.push_back(i);
  }
  origin_ns_ = now_ns();
  running_ = threads_;
  ++generation_;
  start_.notify_all();
  finished_.wait(lock, [&] { return running_ == 0; });
  if (error_) std::rethrow_exception(error_);
  set_begins(trace);
  return trace;
}

/// A stream does not say when it begins an op: as soon as it was put there, and what it waits for
/// had ended.
void Executor::set_begins(Trace& trace) const {
  for (const LaneThread& lane : lanes_) {
    if (!lane.stream) continue;
    int64_t last_end = 0;
    for (const uint32_t op : lane.ops) {
      Trace::Event& event = trace.events[op];
      event.begin_ns = std::max(event.begin_ns, last_end);
      for (const OpId dep : program_->deps_of(program_->ops[op])) {
        event.begin_ns = std::max(event.begin_ns, trace.events[dep.value].end_ns);
      }
      event.begin_ns = std::min(event.begin_ns, event.end_ns);
      last_end = event.end_ns;
    }
  }
}

void Executor::lane_main(size_t lane, LaneWork work) {
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
      (this->*work)(lanes_[lane]);
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

void Executor::put_lane(LaneThread& lane) {
  std::exception_ptr error;
  try {
    put_ops(lane);
  } catch (...) {
    error = std::current_exception();
  }
  {
    const std::lock_guard lock(lane.mutex);
    lane.all_put = true;
  }
  lane.ready.notify_all();
  if (error) std::rethrow_exception(error);
}

void Executor::put_ops(LaneThread& lane) {
  size_t results_from = 0;  // ops before it, of which later ones need the results
  for (size_t i = 0; i < lane.ops.size(); ++i) {
    const Op& op = program_->ops[lane.ops[i]];
    const size_t finished = OpRunner::on_host(op)       ? i
                            : runner_.needs_results(op) ? results_from
                                                        : 0;
    if (!wait_to_put(lane, i, finished)) return;
    wait_for_streams(lane, lane.ops[i]);
    trace_->events[lane.ops[i]].begin_ns = now_ns() - origin_ns_;
    runner_.enqueue(*program_, op, *context_);
    {
      const std::lock_guard lock(lane.mutex);
      runner_.device().record(*lane.events[i % kAhead], *lane.stream);
      lane.put = i + 1;
    }
    lane.ready.notify_all();
    if (op.kind == OpKind::reduce_gradient) results_from = i + 1;
    put_done(lane.ops[i]);
  }
}

bool Executor::wait_to_put(LaneThread& lane, size_t position, size_t finished) {
  std::unique_lock lock(lane.mutex);
  lane.ready.wait(lock, [&] {
    return stopped_ || (ready(lane.ops[position]) && position - lane.finished < kAhead &&
                        lane.finished >= finished);
  });
  return !stopped_;
}

/// Lets the lane's stream wait for what the op needs of other streams.
void Executor::wait_for_streams(LaneThread& lane, uint32_t op) {
  for (const OpId dep : program_->deps_of(program_->ops[op])) {
    LaneThread& other = lanes_[static_cast<size_t>(program_->ops[dep.value].lane)];
    if (!on_stream(dep.value) || &other == &lane) continue;
    const size_t position = other.positions[dep.value];
    // While the op is not finished, its event is not recorded again.
    const std::lock_guard lock(other.mutex);
    if (other.finished > position) continue;
    runner_.device().wait(*lane.stream, *other.events[position % kAhead]);
  }
}

void Executor::finish_lane(LaneThread& lane) {
  for (size_t i = 0; i < lane.ops.size(); ++i) {
    {
      std::unique_lock lock(lane.mutex);
      lane.ready.wait(lock, [&] { return lane.put > i || lane.all_put; });
      if (lane.put <= i) return;
    }
    // What is on the stream is waited for even when a lane has failed: its memory is in use.
    const uint32_t op = lane.ops[i];
    runner_.await(program_->ops[op], *lane.events[i % kAhead]);
    wait_for_results(lane, op);
    runner_.finish(*program_, program_->ops[op], *context_);
    trace_->events[op].end_ns = now_ns() - origin_ns_;
    {
      const std::lock_guard lock(lane.mutex);
      lane.finished = i + 1;
    }
    lane.ready.notify_all();
    complete(op);
  }
}

/// What the op waited for on other streams is done there, but its results may not be taken yet: ops
/// of the host that follow this one need them too.
void Executor::wait_for_results(const LaneThread& lane, uint32_t op) {
  for (const OpId dep : program_->deps_of(program_->ops[op])) {
    LaneThread& other = lanes_[static_cast<size_t>(program_->ops[dep.value].lane)];
    if (!other.stream || &other == &lane) continue;
    const size_t position = other.positions[dep.value];
    std::unique_lock lock(other.mutex);
    other.ready.wait(lock, [&] { return stopped_ || other.finished > position; });
  }
}

bool Executor::on_stream(uint32_t op) const {
  const Op& it = program_->ops[op];
  return lanes_[static_cast<size_t>(it.lane)].stream && !OpRunner::on_host(it);
}

/// Other streams can wait for the op now.
void Executor::put_done(uint32_t op) {
  if (!on_stream(op)) return;
  for (const uint32_t next : successors_[op]) {
    if (on_stream(next)) release(next);
  }
}

void Executor::complete(uint32_t op) {
  for (const uint32_t next : successors_[op]) {
    if (!on_stream(op) || !on_stream(next)) release(next);
  }
}

/// One of the op's dependencies is out of its way.
void Executor::release(uint32_t op) {
  if (pending_[op].fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  LaneThread& lane = lanes_[static_cast<size_t>(program_->ops[op].lane)];
  // Taking the mutex orders the count with the waiter's check; no wake-up is lost.
  { const std::lock_guard lock(lane.mutex); }
  lane.ready.notify_all();
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
