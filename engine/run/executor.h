// Executes Programs: one thread per lane, ops in lane order, each as soon as its dependencies have
// finished. It decides nothing. A transfer may begin while the one before it in its lane ends; the
// trace counts it from there. The first error stops all lanes; run() rethrows it when everything
// in flight has drained. One caller at a time.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "engine/run/op_runner.h"
#include "engine/run/trace.h"

namespace overspill {

/// CPUs for each lane's thread and the threads that it starts; none: those of the process.
using LaneCpus = std::array<std::vector<uint32_t>, kLanes>;

class Executor {
 public:
  Executor(PageStore& store, const Model& model, LaneCpus cpus = {}, const RankGroups& ranks = {});
  ~Executor();

  /// Runs the Program to its end. Trace times start at 0.
  Trace run(const Program& program, StepContext& context);

 private:
  struct LaneThread {
    std::vector<uint32_t> ops;  ///< this Program's, in order
    std::mutex mutex;
    std::condition_variable ready;
    std::thread thread;
  };

  void lane_main(size_t lane);
  void run_lane(LaneThread& lane);
  bool begin_next(const LaneThread& lane, size_t next);
  bool ready(uint32_t op) const;
  bool wait_for(LaneThread& lane, uint32_t op);
  void complete(uint32_t op);
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
  size_t running_ = 0;
  bool closing_ = false;
};

}  // namespace overspill
