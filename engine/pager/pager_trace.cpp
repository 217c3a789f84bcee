// What the pager's Programs did: counts, and a trace of them as one.
#include <algorithm>

#include "engine/base/error.h"
#include "engine/pager/misuse.h"
#include "engine/pager/pager_thread.h"

namespace overspill {
namespace {

constexpr size_t kMostRecordedOps = size_t{1} << 20;

}  // namespace

void PagerThread::record(Program program, Trace trace, int64_t begin_ns) {
  const TraceSummary summary = summarize(program, trace);
  const std::lock_guard lock(mutex_);
  for (size_t lane = 0; lane < kLanes; ++lane) {
    statistics_.lane_bytes[lane] += summary.bytes[lane];
    statistics_.lane_seconds[lane] += summary.busy_seconds[lane];
  }
  for (const Op& op : program.ops) ++statistics_.lane_ops[static_cast<size_t>(op.lane)];
  if (!tracing_ || recorded_ops_ + program.ops.size() > kMostRecordedOps) return;
  recorded_ops_ += program.ops.size();
  recorded_.push_back({std::move(program), std::move(trace), begin_ns});
}

void PagerThread::start_trace() {
  const std::lock_guard lock(mutex_);
  tracing_ = true;
  recorded_.clear();
  recorded_ops_ = 0;
}

void PagerThread::write_trace(const std::filesystem::path& path) {
  std::vector<Recorded> recorded;
  {
    const std::lock_guard lock(mutex_);
    if (recorded_.empty()) {
      refuse(Misuse::bad_argument,
             "nothing is recorded: call osp_trace_start before the steps to be traced");
    }
    recorded.swap(recorded_);
    tracing_ = false;
  }
  Program all;
  Trace trace;
  for (const Recorded& piece : recorded) {
    const auto ops = static_cast<uint32_t>(all.ops.size());
    const auto accesses = static_cast<uint32_t>(all.accesses.size());
    const auto deps = static_cast<uint32_t>(all.deps.size());
    for (Op op : piece.program.ops) {
      op.first_access += accesses;
      op.first_dep += deps;
      all.ops.push_back(op);
    }
    all.accesses.insert(all.accesses.end(), piece.program.accesses.begin(),
                        piece.program.accesses.end());
    for (const OpId dep : piece.program.deps) all.deps.push_back({dep.value + ops});
    const int64_t shift = piece.begin_ns - recorded.front().begin_ns;
    for (const Trace::Event& event : piece.trace.events) {
      trace.events.push_back({event.begin_ns + shift, event.end_ns + shift});
    }
  }
  overspill::write_trace(path, all, layout_, trace, "overspill");
}

}  // namespace overspill
