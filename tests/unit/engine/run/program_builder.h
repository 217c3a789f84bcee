// Programs made by hand, op by op, for tests of what follows from lanes and dependencies alone.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/program/program.h"

namespace overspill::test {

struct ProgramBuilder {
  Program program;

  /// Appends an op without accesses; returns its index.
  uint32_t add(Lane lane, OpKind kind, uint64_t work, const std::vector<uint32_t>& deps = {}) {
    Op op{.kind = kind, .lane = lane};
    op.work = work;
    op.first_dep = static_cast<uint32_t>(program.deps.size());
    op.dep_count = static_cast<uint32_t>(deps.size());
    for (const uint32_t dep : deps) program.deps.push_back({dep});
    program.ops.push_back(op);
    return static_cast<uint32_t>(program.ops.size()) - 1;
  }
};

}  // namespace overspill::test
