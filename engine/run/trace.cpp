// Summaries of traces and their Perfetto form.
#include "engine/run/trace.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "engine/base/fd.h"

namespace overspill {
namespace {

bool moves_bytes(OpKind kind) {
  return kind == OpKind::read || kind == OpKind::write || kind == OpKind::copy_to_device ||
         kind == OpKind::copy_to_host || kind == OpKind::all_gather ||
         kind == OpKind::reduce_scatter || kind == OpKind::all_reduce;
}
bool counts_flops(OpKind kind) {
  return kind == OpKind::forward || kind == OpKind::backward || kind == OpKind::loss ||
         kind == OpKind::score;
}

}  // namespace

int64_t Trace::end_ns() const {
  int64_t end = 0;
  for (const Event& event : events) end = std::max(end, event.end_ns);
  return end;
}

TraceSummary summarize(const Program& program, const Trace& trace) {
  TraceSummary summary;
  int64_t compute_end = 0;
  for (size_t i = 0; i < program.ops.size(); ++i) {
    const Op& op = program.ops[i];
    const Trace::Event& event = trace.events[i];
    const auto lane = static_cast<size_t>(op.lane);
    summary.busy_seconds[lane] += static_cast<double>(event.end_ns - event.begin_ns) * 1e-9;
    if (moves_bytes(op.kind)) summary.bytes[lane] += op.work;
    if (counts_flops(op.kind)) summary.flops += static_cast<double>(op.work);
    if (op.lane != Lane::compute) continue;
    // The dependency that finished last is what the compute lane waited for.
    int64_t latest = compute_end;
    Lane cause = Lane::compute;
    for (const OpId dep : program.deps_of(op)) {
      if (trace.events[dep.value].end_ns <= latest) continue;
      latest = trace.events[dep.value].end_ns;
      cause = program.ops[dep.value].lane;
    }
    if (cause != Lane::compute) {
      summary.stall_seconds[static_cast<size_t>(cause)] +=
          static_cast<double>(event.begin_ns - compute_end) * 1e-9;
    }
    compute_end = event.end_ns;
  }
  summary.seconds = static_cast<double>(trace.end_ns()) * 1e-9;
  return summary;
}

CostModel measure_costs(const Program& program, const Trace& trace, const CostModel& fallback) {
  struct Sum {
    double work = 0, seconds = 0, count = 0;
  };
  std::map<std::pair<OpKind, LayerKind>, Sum> sums;
  for (size_t i = 0; i < program.ops.size(); ++i) {
    const Op& op = program.ops[i];
    Sum& sum = sums[{op.kind, fallback.layer_kind(op.layer)}];
    sum.work += static_cast<double>(op.work);
    sum.seconds += static_cast<double>(trace.events[i].end_ns - trace.events[i].begin_ns) * 1e-9;
    ++sum.count;
  }
  CostModel costs = fallback;
  for (const auto& [key, sum] : sums) {
    const bool has_work = sum.work > 0 && sum.seconds > 0;
    costs.at(key.first, key.second) = has_work ? CostModel::Rate{sum.work / sum.seconds, 0}
                                               : CostModel::Rate{1, sum.seconds / sum.count};
  }
  return costs;
}

void write_trace(const std::filesystem::path& path, const Program& program, const Layout& layout,
                 const Trace& trace, const std::string& name) {
  nlohmann::json events = nlohmann::json::array();
  events.push_back({{"ph", "M"}, {"pid", 1}, {"name", "process_name"}, {"args", {{"name", name}}}});
  for (size_t lane = 0; lane < kLanes; ++lane) {
    const auto* label = lane_name(static_cast<Lane>(lane));
    events.push_back({{"ph", "M"},
                      {"pid", 1},
                      {"tid", lane},
                      {"name", "thread_name"},
                      {"args", {{"name", label}}}});
    events.push_back({{"ph", "M"},
                      {"pid", 1},
                      {"tid", lane},
                      {"name", "thread_sort_index"},
                      {"args", {{"sort_index", lane}}}});
  }
  for (size_t i = 0; i < program.ops.size(); ++i) {
    const Op& op = program.ops[i];
    const Trace::Event& event = trace.events[i];
    const std::string label = fmt::format("{} L{}.{}", op_name(op.kind), op.layer, op.index);
    events.push_back({{"ph", "X"},
                      {"pid", 1},
                      {"tid", static_cast<size_t>(op.lane)},
                      {"name", label},
                      {"cat", op_name(op.kind)},
                      {"ts", static_cast<double>(event.begin_ns) * 1e-3},
                      {"dur", static_cast<double>(event.end_ns - event.begin_ns) * 1e-3},
                      {"args", {{"op", i}, {"work", op.work}}}});
  }
  const nlohmann::json root = {{"displayTimeUnit", "ms"},
                               {"otherData", {{"layers", layout.model.layers.size()}}},
                               {"traceEvents", std::move(events)}};
  write_text_file(path, root.dump() + "\n");
}

}  // namespace overspill
