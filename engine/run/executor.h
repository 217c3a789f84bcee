// Executes Programs: one thread per lane, ops in lane order, each as soon as its dependencies have
// finished. It decides nothing. A transfer may begin while the one before it in its lane ends; the
// trace counts it from there. The first error stops all lanes; run() rethrows it when everything
// in flight has drained. One caller at a time.
//
// Lanes that are streams of a device have two threads: one puts ops on the stream, some ahead, as
// soon as their dependencies on other streams are put there too (the stream then waits for them by
// events) and all others have finished; the second finishes them in order.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "engine/run/op_runner.h"
#include "engine/run/trace.h"

namespace overspill {

/// CPUs for each lane's thread and the threads that it starts; none: those of the process.
using LaneCpus = std::array<std::vector<uint32_t>, kLanes>;

class Executor {
 public:
  /// `layers`: null where another program computes them. All outlive it.
  Executor(PageStore& store, const StateMath& state, const Model* layers, LaneCpus cpus = {},
           const RankGroups& ranks = {});
  ~Executor();

  /// Runs the Program to its end. Trace times start at 0.
  Trace run(const Program& program, StepContext& context);

 private:
  /// Ops of one stream that are put there and not finished yet, at most.
  static constexpr size_t kAhead = 64;
  struct LaneThread {
    std::vector<uint32_t> ops;  ///< this Program's, in order
    std::mutex mutex;
    std::condition_variable ready;
    std::thread thread;

    std::optional<DeviceStream> stream;  ///< then:
    std::thread finisher;
    std::array<std::unique_ptr<DeviceEvent>, kAhead> events;  ///< of ops in turn
    std::vector<size_t> positions;  ///< by op of the Program: where in `ops`
    // Under the mutex.
    size_t put = 0, finished = 0;
    bool all_put = false;  ///< or will never be
  };
  using LaneWork = void (Executor::*)(LaneThread&);

  void start_lanes();
  void end_lanes();
  void lane_main(size_t lane, LaneWork work);
  void run_lane(LaneThread& lane);
  bool begin_next(const LaneThread& lane, size_t next);
  bool ready(uint32_t op) const;
  bool wait_for(LaneThread& lane, uint32_t op);
  void put_lane(LaneThread& lane);
  void put_ops(LaneThread& lane);
  bool wait_to_put(LaneThread& lane, size_t position, size_t finished);
  void wait_for_streams(LaneThread& lane, uint32_t op);
  void finish_lane(LaneThread& lane);
  void wait_for_results(const LaneThread& lane, uint32_t op);
  bool on_stream(uint32_t op) const;
  void put_done(uint32_t op);
  void complete(uint32_t op);
  void release(uint32_t op);
  void set_begins(Trace& trace) const;
  void stop(std::exception_ptr error);

  OpRunner runner_;
  const LaneCpus cpus_;
  std::array<LaneThread, kLanes> lanes_;

  // The Program being run; written between runs under start_mutex_.
  const Program* program_ = nullptr;
  StepContext* context_ = nullptr;
  Trace* trace_ = nullptr;
  int64_t origin_ns_ = 0;
  std::vector<std::vector<uint32_t>> successors_;
  std::unique_ptr<std::atomic<uint32_t>[]> pending_;
  std::atomic<bool> stopped_{false};
  std::exception_ptr error_;

  std::mutex start_mutex_;
  std::condition_variable start_, finished_;
  uint64_t generation_ = 0;
  size_t running_ = 0, threads_ = 0;
  bool closing_ = false;
};

}  // namespace overspill
