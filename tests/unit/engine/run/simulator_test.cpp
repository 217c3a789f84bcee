// Simulated times of hand-built Programs.
#include "engine/run/simulator.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "engine/base/random.h"
#include "tests/unit/engine/run/program_builder.h"

namespace overspill {
namespace {

using test::ProgramBuilder;

/// A nanosecond per unit of work for every kind of op.
CostModel unit_costs() {
  CostModel costs;
  for (size_t kind = 0; kind < kOpKinds; ++kind) costs.set(static_cast<OpKind>(kind), {1e9, 0});
  return costs;
}

/// Of ops in layer 0, where ProgramBuilder puts them.
CostModel::Rate& rate(CostModel& costs, OpKind kind) {
  return costs.at(kind, LayerKind::embedding);
}

void expect_times(const Trace& trace, const std::vector<std::pair<int64_t, int64_t>>& want) {
  ASSERT_EQ(trace.events.size(), want.size());
  for (size_t i = 0; i < want.size(); ++i) {
    EXPECT_EQ(trace.events[i].begin_ns, want[i].first) << "op " << i;
    EXPECT_EQ(trace.events[i].end_ns, want[i].second) << "op " << i;
  }
}

TEST(Simulator, EmptyProgramTakesNoTime) {
  EXPECT_EQ(simulate(Program{}, unit_costs()).end_ns(), 0);
}

TEST(Simulator, LaneRunsItsOpsOneAfterTheOther) {
  ProgramBuilder b;
  b.add(Lane::compute, OpKind::forward, 100);
  b.add(Lane::compute, OpKind::backward, 30);
  b.add(Lane::compute, OpKind::forward, 5);
  expect_times(simulate(b.program, unit_costs()), {{0, 100}, {100, 130}, {130, 135}});
}

TEST(Simulator, IndependentLanesOverlap) {
  ProgramBuilder b;
  b.add(Lane::nvme_read, OpKind::read, 70);
  b.add(Lane::compute, OpKind::forward, 100);
  b.add(Lane::nvme_read, OpKind::read, 70);
  const Trace trace = simulate(b.program, unit_costs());
  expect_times(trace, {{0, 70}, {0, 100}, {70, 140}});
  EXPECT_EQ(trace.end_ns(), 140);
}

TEST(Simulator, OpWaitsForItsLastDependencyAndForItsLane) {
  ProgramBuilder b;
  const uint32_t read = b.add(Lane::nvme_read, OpKind::read, 50);
  const uint32_t copy = b.add(Lane::h2d, OpKind::copy_to_device, 20, {read});
  const uint32_t first = b.add(Lane::compute, OpKind::forward, 10);
  const uint32_t second = b.add(Lane::compute, OpKind::forward, 10, {copy, first});
  b.add(Lane::nvme_write, OpKind::write, 7, {first, second});
  b.add(Lane::nvme_read, OpKind::read, 1, {first});  // its lane, not its dependency, holds it
  expect_times(simulate(b.program, unit_costs()),
               {{0, 50}, {50, 70}, {0, 10}, {70, 80}, {80, 87}, {50, 51}});
}

TEST(Simulator, DurationIsLatencyAndWorkAtTheKindsRate) {
  CostModel costs = unit_costs();
  rate(costs, OpKind::read) = {2e9, 1e-6};
  rate(costs, OpKind::update) = {5e8, 0};
  ProgramBuilder b;
  b.add(Lane::nvme_read, OpKind::read, 4000);
  b.add(Lane::optimizer, OpKind::update, 4000);
  b.add(Lane::nvme_read, OpKind::read, 0);
  expect_times(simulate(b.program, costs), {{0, 3000}, {0, 8000}, {3000, 4000}});
}

/// Earliest times by repeating the two rules until nothing changes: no use of the ops' order.
std::vector<Trace::Event> fixed_point(const Program& program) {
  std::vector<Trace::Event> events(program.ops.size());
  for (bool changed = true; changed;) {
    changed = false;
    for (size_t i = program.ops.size(); i-- > 0;) {
      int64_t begin = 0;
      for (size_t j = 0; j < i; ++j) {
        if (program.ops[j].lane == program.ops[i].lane) begin = std::max(begin, events[j].end_ns);
      }
      for (const OpId dep : program.deps_of(program.ops[i])) {
        begin = std::max(begin, events[dep.value].end_ns);
      }
      const int64_t end = begin + static_cast<int64_t>(program.ops[i].work);
      changed |= end != events[i].end_ns || begin != events[i].begin_ns;
      events[i] = {begin, end};
    }
  }
  return events;
}

TEST(Simulator, RandomProgramsHaveTheirEarliestTimes) {
  for (uint64_t seed = 0; seed < 50; ++seed) {
    SCOPED_TRACE(seed);
    ProgramBuilder b;
    for (uint32_t i = 0; i < 60; ++i) {
      std::vector<uint32_t> deps;
      for (uint64_t d = 0; i > 0 && d < random_below(seed, 4 * i, 4); ++d) {
        deps.push_back(static_cast<uint32_t>(random_below(seed, 1000 + 10 * i + d, i)));
      }
      b.add(static_cast<Lane>(random_below(seed, 4 * i + 1, kLanes)), OpKind::forward,
            random_below(seed, 4 * i + 2, 1000), deps);
    }
    const Trace trace = simulate(b.program, unit_costs());
    const std::vector<Trace::Event> want = fixed_point(b.program);
    for (size_t i = 0; i < want.size(); ++i) {
      ASSERT_EQ(trace.events[i].begin_ns, want[i].begin_ns) << "op " << i;
      ASSERT_EQ(trace.events[i].end_ns, want[i].end_ns) << "op " << i;
    }
  }
}

// ---- sharing ----

CostModel sharing_costs(double read_uses, double write_uses) {
  CostModel costs = unit_costs();
  rate(costs, OpKind::read)[Resource::drives] = read_uses;
  rate(costs, OpKind::write)[Resource::drives] = write_uses;
  return costs;
}

TEST(Simulator, ReadsAndWritesTakeTurnsOnADriveThatDoesOneAtATime) {
  ProgramBuilder b;
  b.add(Lane::nvme_read, OpKind::read, 100);
  b.add(Lane::nvme_write, OpKind::write, 300);
  // Half speed each until the read ends at 200, when 200 of the write are left.
  expect_times(simulate(b.program, sharing_costs(1, 1)), {{0, 200}, {0, 400}});
}

TEST(Simulator, ADriveWithRoomForBothSlowsNeither) {
  ProgramBuilder b;
  b.add(Lane::nvme_read, OpKind::read, 100);
  b.add(Lane::nvme_write, OpKind::write, 300);
  expect_times(simulate(b.program, sharing_costs(0.5, 0.5)), {{0, 100}, {0, 300}});
  // Of 0.8 each, 1.6 are wanted: 0.625 of the speed.
  expect_times(simulate(b.program, sharing_costs(0.8, 0.8)), {{0, 160}, {0, 360}});
}

TEST(Simulator, OthersGoOnWhenAResourceIsUsedUp) {
  CostModel costs = sharing_costs(1, 1);
  rate(costs, OpKind::update)[Resource::cores] = 1;
  ProgramBuilder b;
  b.add(Lane::nvme_read, OpKind::read, 100);
  b.add(Lane::nvme_write, OpKind::write, 100);
  b.add(Lane::optimizer, OpKind::update, 100);
  expect_times(simulate(b.program, costs), {{0, 200}, {0, 200}, {0, 100}});
}

TEST(Simulator, ASmallUserIsNotHeldBackByALargeOne) {
  CostModel costs = unit_costs();
  rate(costs, OpKind::forward)[Resource::cores] = 1.0;
  rate(costs, OpKind::read)[Resource::cores] = 0.25;
  ProgramBuilder b;
  b.add(Lane::compute, OpKind::forward, 800);
  b.add(Lane::nvme_read, OpKind::read, 80);
  // Together 1.25 of the cores: both at 0.8 until the read ends at 100.
  expect_times(simulate(b.program, costs), {{0, 820}, {0, 100}});
}

TEST(Simulator, SharedWorkIsNeitherLostNorMade) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    SCOPED_TRACE(seed);
    CostModel costs = sharing_costs(1, 1);
    ProgramBuilder b;
    double total = 0;
    for (uint32_t i = 0; i < 40; ++i) {
      const uint64_t work = 1 + random_below(seed, i, 1000);
      const bool read = random_below(seed, 100 + i, 2) == 0;
      b.add(read ? Lane::nvme_read : Lane::nvme_write, read ? OpKind::read : OpKind::write, work);
      total += static_cast<double>(work);
    }
    // One resource, always in use: whatever the order, it takes the sum.
    EXPECT_NEAR(static_cast<double>(simulate(b.program, costs).end_ns()), total, 2);
  }
}

}  // namespace
}  // namespace overspill
