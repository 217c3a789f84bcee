// Bytes per lane of real steps against the design's table, the traces of a run, and what a line of
// metrics.jsonl holds. State on NVMe: each weight is read once a pass, whatever the accumulation.
#include <gtest/gtest.h>

#include <atomic>
#include <bit>
#include <cmath>

#include "tests/contract/devices.h"
#include "tests/fault/training_fixture.h"

namespace overspill {
namespace {

using namespace test;

/// Counts what really reaches a backend.
class CountingIo final : public AsyncIo {
 public:
  CountingIo(std::unique_ptr<AsyncIo> inner, std::atomic<uint64_t>& read,
             std::atomic<uint64_t>& written)
      : inner_(std::move(inner)), read_(read), written_(written) {}
  const char* name() const override { return inner_->name(); }
  uint32_t depth() const override { return inner_->depth(); }
  void submit(std::span<const IoRequest> requests) override {
    for (const IoRequest& request : requests) {
      (request.write ? written_ : read_) += request.bytes;
    }
    inner_->submit(requests);
  }
  size_t reap(std::span<IoResult> results, std::chrono::milliseconds timeout) override {
    return inner_->reap(results, timeout);
  }
  void cancel() override { inner_->cancel(); }

 private:
  std::unique_ptr<AsyncIo> inner_;
  std::atomic<uint64_t>&read_, &written_;
};

class TrafficContract : public TrainingTest {
 protected:
  /// Weights, optimizer state and gradients on NVMe; activations stay on the device.
  TrainConfig config(DeviceMode device = DeviceMode::unified, uint32_t depth = 0) const {
    TrainConfig made = tiny_config();
    made.offload.device = device;
    made.offload.prefetch_depth = depth;
    made.offload.activations = Placement::device;
    made.offload.update_twice = false;
    const ModelShape model = RunSetup(made).model;
    EXPECT_EQ(model.layers.size(), 5u);
    return made;
  }
  void SetUp() override {
    TrainingTest::SetUp();
    const ModelShape model = RunSetup(tiny_config()).model;
    embedding_ = model.layers.front().padded;
    block_ = model.layers[1].padded;
    all_ = embedding_ + model.layers.back().padded + kBlocks * block_;
  }
  static uint64_t bytes(const Json& line, const char* lane) {
    return line.at("lane_bytes").value(lane, uint64_t{0});
  }
  /// Weights for the backward: the embedding and the head need none, and with depth p the top p
  /// blocks are still on the device.
  uint64_t backward_reads(uint32_t depth) const {
    return 2 * (kBlocks - std::min<uint64_t>(depth, kBlocks)) * block_;
  }

  static constexpr uint64_t kBlocks = 3;
  uint64_t embedding_ = 0, block_ = 0, all_ = 0;  ///< parameters, padded
};

TEST_F(TrafficContract, StepsMoveTheDesignsBytes) {
  for (const DeviceMode device : devices_under_test()) {
    for (uint32_t depth = 0; depth <= 4; ++depth) {
      SCOPED_TRACE(fmt::format("{} depth {}",
                               device == DeviceMode::unified ? "unified" : "discrete", depth));
      const FinishedRun run = run_fresh(config(device, depth));
      const std::vector<Json> steps = run.steps();
      ASSERT_EQ(steps.size(), 3u);
      const uint64_t again = backward_reads(depth);
      // No update yet: weights in, gradients out.
      EXPECT_EQ(bytes(steps[0], "nvme_read"), 2 * all_ + again);
      EXPECT_EQ(bytes(steps[0], "nvme_write"), 2 * all_);
      // The first update: weights, remainders and gradients in; moments are zero and not read.
      EXPECT_EQ(bytes(steps[1], "nvme_read"), 6 * all_ + again);
      EXPECT_EQ(bytes(steps[1], "nvme_write"), 14 * all_);
      // From then on 14 + 2 for the backward, and 14.
      EXPECT_EQ(bytes(steps[2], "nvme_read"), 14 * all_ + again);
      EXPECT_EQ(bytes(steps[2], "nvme_write"), 14 * all_);
      // The flush before the save: the same update without a step.
      EXPECT_EQ(bytes(run.final(), "nvme_read"), (2 + 6 + 14 + 14) * all_ + 3 * again);
      EXPECT_EQ(bytes(run.final(), "nvme_write"), (2 + 14 + 14 + 12) * all_);
      for (const Json& step : steps) {
        const bool discrete = device == discrete_device();
        EXPECT_EQ(bytes(step, "h2d"), discrete ? 2 * all_ + again : 0);
        EXPECT_EQ(bytes(step, "d2h"), discrete ? 2 * all_ : 0);
      }
    }
  }
}

/// The backward reads a layer's state again instead of its weights alone, and writes as much as
/// ever.
TEST_F(TrafficContract, UpdatingTwiceReadsTheStateAgainAndWritesNothingMore) {
  for (const DeviceMode device : devices_under_test()) {
    for (const uint32_t depth : {0u, 1u, 4u}) {
      SCOPED_TRACE(depth);
      TrainConfig made = config(device, depth);
      made.offload.update_twice = true;
      const FinishedRun run = run_fresh(made);
      const std::vector<Json> steps = run.steps();
      const uint64_t again = backward_reads(depth);
      EXPECT_EQ(bytes(steps[0], "nvme_read"), 2 * all_ + again) << "nothing to update yet";
      // Weights 2, remainder 2 and gradient 2, both times; then the moments' 8 as well. Layers that
      // the ring still holds pass their old weights by it.
      EXPECT_EQ(bytes(steps[1], "nvme_read"), (6 + 6) * all_);
      EXPECT_EQ(bytes(steps[2], "nvme_read"), (14 + 14) * all_);
      EXPECT_EQ(bytes(steps[1], "nvme_write"), 14 * all_);
      EXPECT_EQ(bytes(steps[2], "nvme_write"), 14 * all_);
      const bool discrete = device == discrete_device();
      EXPECT_EQ(bytes(steps[2], "h2d"), discrete ? 2 * all_ + again : 0);
      EXPECT_EQ(bytes(steps[2], "d2h"), discrete ? 2 * all_ : 0);
      EXPECT_EQ(bytes(run.final(), "nvme_read"), (2 + 12 + 28 + 14) * all_ + again) << "one flush";
      EXPECT_EQ(bytes(run.final(), "nvme_write"), (2 + 14 + 14 + 12) * all_);
    }
  }
}

TEST_F(TrafficContract, UpdatingTwiceWithGradientsInMemory) {
  TrainConfig made = config();
  made.offload.update_twice = true;
  made.offload.gradients = Placement::host;
  const FinishedRun run = run_fresh(made);
  EXPECT_EQ(bytes(run.steps()[2], "nvme_read"), (12 + 12) * all_);
  EXPECT_EQ(bytes(run.steps()[2], "nvme_write"), 12 * all_);
}

TEST_F(TrafficContract, AccumulationMovesNothingMore) {
  std::vector<std::vector<Json>> runs;
  for (const uint32_t micro_batches : {1u, 3u, 8u}) {
    TrainConfig made = config(discrete_device());
    made.gradient_accumulation_steps = micro_batches;
    runs.push_back(run_fresh(made).steps());
    for (size_t step = 0; step < 3; ++step) {
      EXPECT_EQ(runs.back()[step].at("lane_bytes"), runs[0][step].at("lane_bytes"));
    }
  }
  EXPECT_GT(bytes(runs[0][2], "nvme_read"), 14 * all_);
}

TEST_F(TrafficContract, GradientsInHostMemorySaveTheirBytes) {
  TrainConfig made = config();
  made.offload.gradients = Placement::host;
  const FinishedRun run = run_fresh(made);
  EXPECT_EQ(bytes(run.steps()[2], "nvme_read"), 12 * all_ + backward_reads(0));
  EXPECT_EQ(bytes(run.steps()[2], "nvme_write"), 12 * all_);
  EXPECT_EQ(bytes(run.steps()[0], "nvme_write"), 0u);
}

TEST_F(TrafficContract, WeightsInMemorySaveTheirBytes) {
  for (const Placement tier : {Placement::host, Placement::device}) {
    TrainConfig made = config();
    made.offload.weights = tier;
    const FinishedRun run = run_fresh(made);
    EXPECT_EQ(bytes(run.steps()[2], "nvme_read"), 12 * all_);  // state 10, gradients 2
    EXPECT_EQ(bytes(run.steps()[2], "nvme_write"), 12 * all_);
  }
}

TEST_F(TrafficContract, UpdatesInTheBackwardNeverSpillGradients) {
  TrainConfig made = config();
  update_in_backward(made);
  const FinishedRun run = run_fresh(made);
  const std::vector<Json> steps = run.steps();
  // The weights for the backward serve the update too; only the embedding's are read for it.
  const uint64_t weights = 2 * all_ + backward_reads(0) + 2 * embedding_;
  EXPECT_EQ(bytes(steps[0], "nvme_read"), weights + 2 * all_);
  EXPECT_EQ(bytes(steps[0], "nvme_write"), 12 * all_);
  EXPECT_EQ(bytes(steps[1], "nvme_read"), weights + 10 * all_);
  EXPECT_EQ(bytes(steps[1], "nvme_write"), 12 * all_);
  EXPECT_EQ(bytes(steps[2], "nvme_read"), weights + 10 * all_);
  EXPECT_EQ(bytes(run.final(), "nvme_read"), 3 * weights + (2 + 10 + 10) * all_) << "no flush";
}

TEST_F(TrafficContract, EvaluationReadsTheWeightsOncePerGroupOfMicroBatches) {
  TrainConfig made = config();
  made.datasets.push_back({.path = root_ / "val.bin", .type = TokenFormat::nanogpt});
  made.datasets.back().evaluation = true;
  made.eval_sequences = 4;  // two groups of two
  const FinishedRun run = run_fresh(made);
  EXPECT_EQ(bytes(run.final(), "nvme_read"),
            (2 + 6 + 14 + 14) * all_ + 3 * backward_reads(0) + 2 * 2 * all_);
}

/// The metrics tell what the drives saw: lanes, and the pages that loading and saving move.
TEST_F(TrafficContract, MetricsCountWhatReachesTheDrives) {
  std::atomic<uint64_t> read{0}, written{0};
  TrainConfig made = config(discrete_device(), 1);
  made.offload.activations = Placement::nvme;
  made.gradient_accumulation_steps = 4;
  made.offload.io.wrap = [&](std::unique_ptr<AsyncIo> io) {
    return std::make_unique<CountingIo>(std::move(io), read, written);
  };
  const FinishedRun run = run_fresh(made);
  EXPECT_EQ(read, bytes(run.final(), "nvme_read") + 12 * all_);
  EXPECT_EQ(written, bytes(run.final(), "nvme_write") + 4 * all_);
}

std::vector<std::string> ops_of(const fs::path& path) {
  std::vector<std::string> ops;
  const Json trace = Json::parse(bytes_of_file(path));
  for (const Json& event : trace.at("traceEvents")) {
    if (event.at("ph") != "X") continue;
    EXPECT_GE(event.at("ts").get<double>(), 0);
    EXPECT_GE(event.at("dur").get<double>(), 0);
    ops.push_back(event.at("name").get<std::string>() + " " + event.at("cat").dump() + " lane " +
                  event.at("tid").dump() + " " + event.at("args").dump());
  }
  return ops;
}

TEST_F(TrafficContract, SimulatedAndExecutedTracesHaveTheSameOps) {
  for (const bool in_backward : {false, true}) {
    TrainConfig made = config(discrete_device(), 1);
    made.offload.activations = Placement::nvme;
    if (in_backward) update_in_backward(made);
    fs::remove_all(made.output_dir);
    const FinishedRun finished = run(made);
    const std::vector<std::string> executed = ops_of(finished.report.trace);
    EXPECT_EQ(executed, ops_of(finished.report.predicted_trace));
    EXPECT_GT(executed.size(), 100u);
    const Json trace = Json::parse(bytes_of_file(finished.report.trace));
    uint64_t bytes_read = 0, tracks = 0;
    for (const Json& event : trace.at("traceEvents")) {
      tracks += event.at("name") == "thread_name";
      if (event.at("ph") == "X" && event.at("cat") == "read") {
        bytes_read += event.at("args").at("work").get<uint64_t>();
      }
    }
    EXPECT_EQ(tracks, kLanes);
    EXPECT_EQ(bytes_read, bytes(finished.steps().back(), "nvme_read"));
    EXPECT_GT(finished.report.predicted_step_seconds, 0);
  }
}

TEST_F(TrafficContract, NumbersReadBackToTheSameBits) {
  const TrainConfig made = config();
  const FinishedRun finished = run(made);
  std::istringstream stream(bytes_of_file(made.output_dir / "metrics.jsonl"));
  std::vector<double> losses;  // by another reader than the writer's library
  for (std::string line; std::getline(stream, line);) {
    EXPECT_EQ(Json::parse(line).dump(), line);
    const size_t at = line.find("\"loss\":");
    if (at != std::string::npos) losses.push_back(std::strtod(line.c_str() + at + 7, nullptr));
  }
  ASSERT_EQ(losses.size(), 3u);
  EXPECT_EQ(std::bit_cast<uint64_t>(losses[2]), std::bit_cast<uint64_t>(finished.report.last_loss));
  const auto needs_double = [](double loss) { return static_cast<float>(loss) != loss; };
  EXPECT_TRUE(std::ranges::any_of(losses, needs_double)) << "a double has more digits";
  EXPECT_EQ(std::bit_cast<uint64_t>(finished.final().at("first_loss").get<double>()),
            std::bit_cast<uint64_t>(finished.report.first_loss));
}

void expect_lanes(const Json& object, const char* key, bool integers) {
  ASSERT_TRUE(object.at(key).is_object()) << key;
  for (const auto& [lane, value] : object.at(key).items()) {
    EXPECT_TRUE(integers ? value.is_number_unsigned() : value.is_number_float()) << key << lane;
  }
}

TEST_F(TrafficContract, EveryFieldOfALineIsThereWithItsType) {
  const TrainConfig made = config(discrete_device(), 1);
  const FinishedRun finished = run(made);
  uint64_t number = 0;
  for (const Json& line : finished.steps()) {
    EXPECT_EQ(line.at("step").get<uint64_t>(), ++number);
    for (const char* key :
         {"loss", "grad_norm", "learning_rate", "tokens_per_second", "step_seconds"}) {
      EXPECT_TRUE(line.at(key).is_number_float()) << key;
      EXPECT_GT(line.at(key).get<double>(), 0) << key;
    }
    EXPECT_EQ(line.at("tokens").get<uint64_t>(), number * 2 * 32);
    EXPECT_EQ(line.at("update_skipped"), false);
    expect_lanes(line, "lane_busy_seconds", false);
    expect_lanes(line, "stall_seconds", false);
    expect_lanes(line, "lane_bytes", true);
    for (const char* lane : {"compute", "nvme_read", "nvme_write", "h2d", "d2h"}) {
      EXPECT_GT(line.at("lane_busy_seconds").at(lane).get<double>(), 0) << lane;
      EXPECT_LE(line.at("lane_busy_seconds").at(lane).get<double>(),
                line.at("step_seconds").get<double>());
    }
    EXPECT_LE(line.at("host_memory_peak").get<uint64_t>(), *made.offload.host_memory);
    EXPECT_LE(line.at("device_memory_peak").get<uint64_t>(), *made.offload.device_memory);
  }
  EXPECT_EQ(number, 3u);
  const Json& last = finished.final();
  EXPECT_EQ(last.at("final"), true);
  EXPECT_EQ(last.at("steps").get<uint64_t>(), 3u);
  EXPECT_EQ(last.at("interrupted"), false);
  EXPECT_GT(last.at("peak_rss").get<uint64_t>(), 1 * kMiB);
  EXPECT_GE(last.at("nvme_bytes").get<uint64_t>(), 14 * all_);
  expect_lanes(last, "lane_bytes", true);
  EXPECT_EQ(last.at("checkpoint").get<std::string>(), (made.output_dir / "checkpoint-3").string());
}

}  // namespace
}  // namespace overspill
