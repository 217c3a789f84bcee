// What is derived from traces: busy and stall times, bytes, measured rates, and the Perfetto file.
#include "engine/run/trace.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "engine/run/simulator.h"
#include "tests/unit/engine/run/program_builder.h"

namespace overspill {
namespace {

using test::ProgramBuilder;
using Json = nlohmann::json;

double at(const std::array<double, kLanes>& values, Lane lane) {
  return values[static_cast<size_t>(lane)];
}

/// A Program and a trace of it, written down together.
struct Story : ProgramBuilder {
  Trace trace;
  uint32_t add(Lane lane, OpKind kind, uint64_t work, int64_t begin, int64_t end,
               const std::vector<uint32_t>& deps = {}) {
    trace.events.push_back({begin, end});
    return ProgramBuilder::add(lane, kind, work, deps);
  }
};

Story example() {
  Story s;
  const uint32_t read = s.add(Lane::nvme_read, OpKind::read, 4096, 0, 100);
  const uint32_t copy = s.add(Lane::h2d, OpKind::copy_to_device, 4096, 100, 130, {read});
  // Waits 130 for the copy, which finished after the read.
  const uint32_t forward = s.add(Lane::compute, OpKind::forward, 7000, 130, 200, {read, copy});
  const uint32_t late = s.add(Lane::nvme_read, OpKind::read, 8192, 100, 260);
  const uint32_t update = s.add(Lane::optimizer, OpKind::update, 50, 100, 240);
  // Waits from 200 to 262 for the second read: the last to finish, and the op began 2 after it.
  const uint32_t loss = s.add(Lane::compute, OpKind::loss, 1000, 262, 300, {late, update, forward});
  // Its dependencies were done: the pause of 5 is the executor's own, nobody's stall.
  s.add(Lane::compute, OpKind::backward, 2000, 305, 400, {read, loss});
  s.add(Lane::nvme_write, OpKind::write, 512, 400, 450, {forward});
  s.add(Lane::compute, OpKind::reduce_gradient, 99, 400, 410);
  return s;
}

TEST(Trace, SummaryAttributesStallsToTheLastDependencysLane) {
  const Story s = example();
  const TraceSummary summary = summarize(s.program, s.trace);
  EXPECT_NEAR(at(summary.stall_seconds, Lane::h2d), 130e-9, 1e-15);
  EXPECT_NEAR(at(summary.stall_seconds, Lane::nvme_read), 62e-9, 1e-15);
  for (const Lane lane :
       {Lane::nvme_write, Lane::d2h, Lane::compute, Lane::collective, Lane::optimizer}) {
    EXPECT_EQ(at(summary.stall_seconds, lane), 0) << lane_name(lane);
  }
}

TEST(Trace, SummaryAddsUpBusyTimesBytesAndFlops) {
  const Story s = example();
  const TraceSummary summary = summarize(s.program, s.trace);
  EXPECT_NEAR(at(summary.busy_seconds, Lane::nvme_read), 260e-9, 1e-15);
  EXPECT_NEAR(at(summary.busy_seconds, Lane::h2d), 30e-9, 1e-15);
  EXPECT_NEAR(at(summary.busy_seconds, Lane::compute), (70 + 38 + 95 + 10) * 1e-9, 1e-15);
  EXPECT_NEAR(at(summary.busy_seconds, Lane::optimizer), 140e-9, 1e-15);
  EXPECT_EQ(at(summary.busy_seconds, Lane::d2h), 0);
  const auto bytes = [&](Lane lane) { return summary.bytes[static_cast<size_t>(lane)]; };
  EXPECT_EQ(bytes(Lane::nvme_read), 4096u + 8192u);
  EXPECT_EQ(bytes(Lane::nvme_write), 512u);
  EXPECT_EQ(bytes(Lane::h2d), 4096u);
  EXPECT_EQ(bytes(Lane::optimizer), 0u) << "an update's work is parameters, not bytes";
  EXPECT_EQ(summary.flops, 10000) << "a reduction's work is not FLOPs";
  EXPECT_NEAR(summary.seconds, 450e-9, 1e-15);
}

TEST(Trace, BusyAndStallCoverTheComputeLaneBetweenItsOps) {
  // Under the simulator the compute lane either works or waits for a dependency.
  ProgramBuilder b;
  CostModel costs;
  for (size_t kind = 0; kind < kOpKinds; ++kind) costs.set(static_cast<OpKind>(kind), {1e9, 0});
  const uint32_t read = b.add(Lane::nvme_read, OpKind::read, 500);
  b.add(Lane::compute, OpKind::forward, 200);
  const uint32_t next = b.add(Lane::compute, OpKind::forward, 300, {read});
  b.add(Lane::optimizer, OpKind::update, 900, {read});
  b.add(Lane::compute, OpKind::loss, 100, {3, next});
  const Trace trace = simulate(b.program, costs);
  const TraceSummary summary = summarize(b.program, trace);
  EXPECT_NEAR(at(summary.stall_seconds, Lane::nvme_read), 300e-9, 1e-15);
  EXPECT_NEAR(at(summary.stall_seconds, Lane::optimizer), 600e-9, 1e-15);
  EXPECT_NEAR(at(summary.busy_seconds, Lane::compute) + 900e-9, summary.seconds, 1e-15);
}

TEST(Trace, MeasuredCostsAreWorkOverTimeByKind) {
  const Story s = example();
  CostModel fallback;
  for (size_t kind = 0; kind < kOpKinds; ++kind)
    fallback.set(static_cast<OpKind>(kind), {123, 0.5});
  CostModel costs = measure_costs(s.program, s.trace, fallback);
  const auto rate = [&](OpKind kind) { return costs.at(kind, LayerKind::embedding); };
  EXPECT_NEAR(rate(OpKind::read).work_per_second, (4096 + 8192) / 260e-9, 1);
  EXPECT_NEAR(rate(OpKind::forward).work_per_second, 7000 / 70e-9, 1);
  EXPECT_EQ(rate(OpKind::read).latency_seconds, 0);
  EXPECT_EQ(rate(OpKind::score).work_per_second, 123) << "no such op: the fallback";
  EXPECT_EQ(rate(OpKind::score).latency_seconds, 0.5);
}

TEST(Trace, CostsMeasuredOnASimulationAreTheSimulatedOnes) {
  const Story s = example();
  CostModel costs;
  for (size_t kind = 0; kind < kOpKinds; ++kind) {
    costs.set(static_cast<OpKind>(kind), {1e3 * static_cast<double>(kind + 1), 0});
  }
  const Trace simulated = simulate(s.program, costs);
  const CostModel measured = measure_costs(s.program, simulated, CostModel{});
  for (const OpKind kind : {OpKind::read, OpKind::forward, OpKind::update, OpKind::write}) {
    EXPECT_NEAR(measured.at(kind, LayerKind::embedding).work_per_second /
                    costs.at(kind, LayerKind::embedding).work_per_second,
                1, 1e-6);
  }
  EXPECT_NEAR(static_cast<double>(simulate(s.program, measured).end_ns()),
              static_cast<double>(simulated.end_ns()), 1e-6 * 1e9);
}

TEST(Trace, CostsOfAnOpWithoutWorkAreItsTime) {
  ProgramBuilder b;
  b.add(Lane::compute, OpKind::forward, 0);
  b.add(Lane::compute, OpKind::forward, 0);
  const Trace trace{{{0, 100}, {100, 400}}};
  const CostModel costs = measure_costs(b.program, trace, CostModel{});
  EXPECT_NEAR(costs.seconds(b.program.ops[0]), 200e-9, 1e-15);
}

class TraceFile : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = (std::filesystem::temp_directory_path() / "overspill_trace_XXXXXX").string();
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    directory_ = name;
  }
  void TearDown() override { std::filesystem::remove_all(directory_); }

  Json written(const Story& s) const {
    write_trace(directory_ / "trace.json", s.program, Layout{}, s.trace, "a \"name\"");
    std::ifstream stream(directory_ / "trace.json");
    return Json::parse(stream).at("traceEvents");
  }

  std::filesystem::path directory_;
};

TEST_F(TraceFile, HasOneNamedTrackPerLane) {
  std::map<size_t, std::string> tracks;
  std::string process;
  for (const Json& event : written(example())) {
    if (event.at("name") == "process_name") process = event.at("args").at("name");
    if (event.at("name") != "thread_name") continue;
    EXPECT_EQ(event.at("ph"), "M");
    EXPECT_TRUE(tracks.emplace(event.at("tid"), event.at("args").at("name")).second);
  }
  EXPECT_EQ(process, "a \"name\"");
  ASSERT_EQ(tracks.size(), kLanes);
  for (size_t lane = 0; lane < kLanes; ++lane) {
    EXPECT_EQ(tracks.at(lane), lane_name(static_cast<Lane>(lane)));
  }
}

TEST_F(TraceFile, HasEveryOpOnItsLanesTrackInMicroseconds) {
  const Story s = example();
  size_t ops = 0;
  for (const Json& event : written(s)) {
    if (event.at("ph") != "X") continue;
    const size_t op = event.at("args").at("op");
    ASSERT_EQ(op, ops++);
    EXPECT_EQ(event.at("tid"), static_cast<size_t>(s.program.ops[op].lane));
    EXPECT_EQ(event.at("pid"), 1);
    EXPECT_EQ(event.at("cat"), op_name(s.program.ops[op].kind));
    EXPECT_EQ(event.at("args").at("work"), s.program.ops[op].work);
    const auto& times = s.trace.events[op];
    EXPECT_NEAR(event.at("ts").get<double>(), static_cast<double>(times.begin_ns) / 1e3, 1e-9);
    EXPECT_NEAR(event.at("dur").get<double>(),
                static_cast<double>(times.end_ns - times.begin_ns) / 1e3, 1e-9);
  }
  EXPECT_EQ(ops, s.program.ops.size());
}

}  // namespace
}  // namespace overspill
