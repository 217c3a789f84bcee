// What happened when: one event per op, the same for executed and simulated Programs, and what
// follows from it (busy and stall times, measured rates, Perfetto JSON).
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "engine/plan/cost_model.h"
#include "engine/plan/layout.h"
#include "engine/program/program.h"

namespace overspill {

/// Times of ops by their index in the Program, in nanoseconds from the step's start.
struct Trace {
  struct Event {
    int64_t begin_ns = 0;
    int64_t end_ns = 0;
  };
  std::vector<Event> events;

  int64_t end_ns() const;
};

struct TraceSummary {
  std::array<double, kLanes> busy_seconds{};
  std::array<uint64_t, kLanes> bytes{};  ///< transfer lanes only
  /// How long the compute lane waited, by the lane of the dependency that finished last.
  std::array<double, kLanes> stall_seconds{};
  double flops = 0;
  double seconds = 0;
};
TraceSummary summarize(const Program& program, const Trace& trace);

/// Rates by kind of op and layer as this trace shows them, with what sharing cost in them. Kinds
/// that did not occur keep `fallback`'s.
CostModel measure_costs(const Program& program, const Trace& trace, const CostModel& fallback);

/// Chrome/Perfetto JSON, one track per lane; `name` becomes the process's name. Written whole.
void write_trace(const std::filesystem::path& path, const Program& program, const Layout& layout,
                 const Trace& trace, const std::string& name);

}  // namespace overspill
